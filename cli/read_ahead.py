"""`longctx train` has the system read the model's weights while it imports what will use them.

Imports take ten seconds or more, and from a disk the weights of a model take as long. Another
process asks for them, so that they are in the page cache when the run's processes read them. It
holds none of them itself, and ends with the launcher.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, takewhile
from pathlib import Path

import psutil

from longctx_patch.health.process_tree import SET_DEATH_SIGNAL

ADVICE_BYTES = 2**17
"""What one advice asks for: the system reads no more of a longer one than its disk's settings say,
and 128 KiB are the least that they usually say."""
SHARE_OF_MEMORY = 0.5
"""The most of the free memory that is filled: beyond it, what was read first would be dropped."""
READERS = 4
"""Files that are read at once."""


def start_reading_ahead(model: str) -> None:
    """Start the process, for the safetensors files of a folder or of the hub's cache.

    Nothing is read for a bare config, for a model that is not on this machine yet, or where the
    system takes no such advice. Call it while this process has one thread.
    """
    reads = model and not model.endswith(".json") and hasattr(os, "posix_fadvise")
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
    if sys.platform == "linux":
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
    with path.open("rb") as file:
        for start, length in _blocks(path.stat().st_size):
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, ADVICE_BYTES):
        yield start, min(ADVICE_BYTES, size - start)
