"""Processes that a launcher forks wait for each other before they connect to its store.

A fork takes along the locks that other threads of the launcher hold at that moment. The thread of
torch's store looks up the name of whoever connects to it, under a lock of the C library: a process
that is forked meanwhile has this lock taken for ever, and hangs as it connects itself. So nobody
connects while others are still to be forked.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

BORN = "longctx_born"
"""A file in the folder that torch's launcher makes for each process, once the process is there."""
PATIENCE_S = 60.0
"""The time after which a process goes on without the others, whose files a full disk may lack."""
LOOK_S = 0.01


def wait_for_siblings() -> None:
    """Wait until all processes of this machine are there; at once without torch's launcher."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    folder = Path(error_file).parent
    with suppress(OSError):
        (folder / BORN).touch()
    deadline = time.monotonic() + PATIENCE_S
    for rank in range(int(os.environ["LOCAL_WORLD_SIZE"])):
        file = folder.parent / str(rank) / BORN
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
