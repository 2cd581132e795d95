"""Says why a process ends: on the screen, and to the launcher, which repeats it in its summary."""

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
