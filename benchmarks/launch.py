"""Start the processes of one job on this machine, and end them when their time is up.

A job that hangs or crashes does not end the script that started it, which goes on with the next.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.utils.distributed import get_free_port

ALLOCATOR = "expandable_segments:True"  # what `make_accelerator` sets: for peers too
GRACE_S = 10.0  # time for the other processes to end, once one has failed
POLL_S = 0.1


class Ending(NamedTuple):
    """How a job ended."""

    seconds: float
    problem: str | None
    """None if no process failed. Otherwise what happened, with the last line of its log."""


def end_with_children() -> None:
    """Make SIGTERM, which `timeout` sends, end this process's jobs too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Budget:
    """Time for all jobs together."""

    def __init__(self, total_s: float) -> None:
        self._deadline = time.monotonic() + total_s

    def limit_s(self, most_s: float) -> float:
        """The seconds that a job may take now: `most_s` or what is left; 0 if that is nothing."""
        return max(0.0, min(most_s, self._deadline - time.monotonic()))


def run_job(
    script: Path,
    arguments: Sequence[str],
    num_processes: int,
    limit_s: float,
    logs: Path,
    packages: str | None = None,
) -> Ending:
    """Run a script in `num_processes` processes that find each other as under torchrun.

    One process gets no such environment, since Accelerate would wrap its model in DDP, and sees
    one GPU, since Trainer would copy its model to all.

    Args:
        script: of Python; its folder is on the path of its processes.
        limit_s: after that many seconds all processes, and what they have started, are killed.
        logs: prefix of the files with what each process prints: `logs`.rank0.log and so on.
        packages: a folder of Python packages that only this job sees.
    """
    started = time.monotonic()
    if limit_s <= 0:
        return Ending(0.0, "not started: the time for all launches (--budget-s) was over")
    settings = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ALLOCATOR),
    }
    if packages is not None:
        paths = [packages, os.environ.get("PYTHONPATH")]
        settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    job = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    if num_processes == 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        settings["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    files = [logs.with_name(f"{logs.name}.rank{rank}.log") for rank in range(num_processes)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, file in enumerate(files):
            place = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with file.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env=os.environ | settings | (place if num_processes > 1 else {}),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group that can be killed with its children
                )
            processes.append(process)
        problem = _wait(processes, files, started + limit_s, limit_s)
    finally:
        for process in processes:
            _kill(process)
    return Ending(time.monotonic() - started, problem)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    files: Sequence[Path],
    deadline: float,
    limit_s: float,
) -> str | None:
    """Wait until all have ended, the time is up, or one has failed and the rest had their grace.

    Returns what went wrong, if anything did.
    """
    first_failed: int | None = None
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first_failed is None:
            first_failed = failed[0]
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if None not in codes or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if first_failed is not None:
        code, said = codes[first_failed], _last_line(files[first_failed])
        return f"rank {first_failed} ended with {code}: {said}"
    if None in codes:
        return f"ended at its time limit of {limit_s:g} s; rank 0 said last: {_last_line(files[0])}"
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, also those that outlived it."""
    with suppress(ProcessLookupError, PermissionError):  # if no process of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    errors = [line for line in said if "Error" in line.split(" ")[0]]
    return (errors or said or ["nothing"])[-1][:300]
