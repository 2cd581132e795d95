"""A job of some steps under a watchdog, for launchers: `stepping.py FOLDER`.

Each step is an all-reduce. In step 5 rank 1 sleeps.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from longctx_patch.health.limits import TimeLimits
from longctx_patch.health.watchdog import Watchdog


def sleep_long() -> None:
    time.sleep(100)


def main(folder: Path) -> None:
    with Watchdog(TimeLimits(step_s=3.0), folder=folder / "flight", interval_s=0.3) as watchdog:
        dist.init_process_group("gloo")
        # As in recipes, which save at this signal: it doesn't end a process at once.
        signal.signal(signal.SIGTERM, lambda *_: None)
        rank = dist.get_rank()
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        for step in range(1, 6):
            if step == 5 and rank == 1:
                sleep_long()
            time.sleep(0.2)
            dist.all_reduce(torch.zeros(1))
            watchdog.done(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
