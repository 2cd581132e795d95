"""Ends a process: what it says to the screen and its launcher, and the processes around it."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

State = Literal["runs", "stopped", "gone"]
ORPHAN_S = 1.0
"""How often a process looks whether its launcher is there."""

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


def born_at(pid: int | None = None) -> float:
    """When a process was started: with its number it names a process, as numbers come again."""
    return float(psutil.Process(pid).create_time())


def state_of(pid: int, born: float) -> State:
    """Says whether a process of this machine runs, was stopped by a signal, or has ended."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        if process.create_time() != born or status == psutil.STATUS_ZOMBIE:
            return "gone"
    except psutil.NoSuchProcess:
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"


def kill(pid: int, born: float) -> None:
    """End a process of this machine at once, also one that was stopped."""
    if state_of(pid, born) != "gone":
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_children() -> None:
    """End what this process has started, such as workers that read data."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def launcher() -> int | None:
    """The process of torch's launcher that started this one; None where there is none."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with(parent: int, say: Callable[[str], object]) -> None:
    """Watch beside this process from its first moment, while a `Watchdog` is not there yet: end it
    when the process that started it has gone.

    Args:
        parent: the number of that process, which knows it better than a child that it may leave.
        say: is told.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_S)
        time.sleep(2 * ORPHAN_S)  # a watchdog ends it with what the run was doing, and its children
        say("its launcher is gone, so the process ends.")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
