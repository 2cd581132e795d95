"""Says why a process ends: on the screen, and to the launcher, which repeats it in its summary."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SYSTEM = {
    errno.ENOSPC: "Make room there, or write to another place.",
    errno.EDQUOT: "Make room there, or write to another place.",
    errno.EROFS: "Make it writable, or name another place (TMPDIR for temporary files).",
    errno.EMFILE: "Raise the limit: ulimit -n 4096.",
    errno.ENFILE: "End other programs, or raise fs.file-max.",
    errno.EPIPE: "What reads the output has ended: send it to a file, > run.log 2>&1.",
}
"""What to do about errors of the system that are no fault of the program."""


def words_of(error: OSError) -> str | None:
    """One line for such an error; None for another one, whose traceback is of use."""
    if error.errno not in SYSTEM:
        return None
    unnamed = "/dev/shm, most likely" if error.errno == errno.EROFS else "most likely the output"
    return f"{error.strerror}: {error.filename or unnamed}. {SYSTEM[error.errno]}"


def say(message: str) -> None:
    """Never fails: a launcher that is gone has left a pipe that nobody reads."""
    message = without_advice(message)
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    with suppress(OSError):
        _tell_launcher(message)


def without_advice(error: str) -> str:
    """An error's text without what gloo adds to those of a lost connection, greetings included."""
    return re.sub(r"\s*This is typically caused by a remote worker.*?GLHF!( \S+)?", "", error)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within the context SIGTERM doesn't end this process, which is about to end by itself: the
    launcher sends it as soon as another process has ended, before words are found."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _tell_launcher(message: str) -> None:
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")
