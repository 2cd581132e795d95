"""A file that says what a process is busy with, read by its launcher and by ranks of its machine.

A process that was killed or stopped can't say it any more, and its last sign of life may be a
second old. The file is memory that is shared, so that a mark costs a microsecond, and outlives the
process.
"""

import mmap
import os
from pathlib import Path

NAME = "longctx_trail"
"""Of the file, in the folder that torch's launcher makes for the process."""
OWN_END = ", as it ended by itself"
"""Ends the trail of a process that has failed or is done: who finds it gone need not wonder why."""
LENGTH = 128
"""Bytes of a trail, more than any phase and step take."""


class Trail:
    """Keeps the newest of this process's marks where torch's launcher has a folder for it; without
    such a launcher nowhere."""

    def __init__(self) -> None:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.path = str(Path(error_file).with_name(NAME)) if error_file else ""
        self._memory = _shared(Path(self.path)) if self.path else None
        self._words, self._has_ended = "", False

    def mark(self, words: str) -> None:
        if self._memory is not None and not self._has_ended:
            self._words = words
            self._memory[:] = words.encode()[:LENGTH].ljust(LENGTH, b"\0")

    def end(self) -> None:
        """The last mark: from now on this process ends by itself."""
        self.mark(f"{self._words}{OWN_END}")
        self._has_ended = True


def trail_of(local_rank: int, logs: Path) -> Path | None:
    """The file of a process, in the folder that torch's launcher was given for logs."""
    return next(logs.glob(f"*/attempt_*/{local_rank}/{NAME}"), None)


def read_trail(path: str | os.PathLike[str] | None) -> str:
    """What the process was busy with last; nothing where that is not known."""
    try:
        return Path(path).read_bytes().rstrip(b"\0").decode(errors="replace") if path else ""
    except OSError:
        return ""


def _shared(path: Path) -> mmap.mmap | None:
    try:
        path.write_bytes(bytes(LENGTH))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), LENGTH)
    except OSError:  # a full disk must not end a job for want of a mark
        return None
