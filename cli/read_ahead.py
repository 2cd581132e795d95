"""`longctx train` has the system read the model's weights while it imports what will use them.

Imports take ten seconds or more, and from a disk the weights of a model take as long. Another
process reads them into the page cache, so that they are there when the run's processes ask for
them. It holds none of them itself, and ends with the launcher.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, takewhile
from pathlib import Path

import psutil

from longctx_patch.health.process_tree import SET_DEATH_SIGNAL

BLOCK_BYTES = 2**23
SHARE_OF_MEMORY = 0.5
"""The most of the free memory that is filled: beyond it, what was read first would be dropped."""
READERS = 2
"""Files that are read at once: few, since imports read from the same disk."""


def start_reading_ahead(model: str) -> None:
    """Start the process, for the safetensors files of a folder or of the hub's cache.

    Nothing is read for a bare config, for a model that is not on this machine yet, or by another
    system than Linux. Call it while this process has one thread.
    """
    reads = model and not model.endswith(".json") and sys.platform == "linux"
    launcher = os.getpid()
    if not reads or os.fork():
        return
    try:  # in the new process, which must not return into the launcher
        _end_with_launcher()
        if os.getppid() == launcher:
            _read(_files(model))
    finally:
        os._exit(0)


def _end_with_launcher() -> None:
    """Let signals end this process in silence, and the end of the one that forked it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))


def _files(model: str) -> list[Path]:
    """The model's files that fit into the memory, in the order of their names."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    files = sorted(folder.glob("*.safetensors"))
    limit = SHARE_OF_MEMORY * psutil.virtual_memory().available
    read = accumulate(file.stat().st_size for file in files)
    return [
        file for file, _ in takewhile(lambda pair: pair[1] <= limit, zip(files, read, strict=True))
    ]


def _read(files: Iterable[Path]) -> None:
    """Bring the files into the page cache."""
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(_read_file, files))


def _read_file(path: Path) -> None:
    """Have the system copy the file to nowhere: its bytes don't come to this process."""
    with path.open("rb") as file, open(os.devnull, "wb") as nowhere:
        done = 0
        while sent := os.sendfile(nowhere.fileno(), file.fileno(), done, BLOCK_BYTES):
            done += sent
