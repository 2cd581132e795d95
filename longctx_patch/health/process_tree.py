"""Processes around this one: its launcher, its children, and ranks of the same machine."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Literal

import psutil

State = Literal["runs", "stopped", "gone"]
GONE = -1
"""In place of the number of a launcher that has ended."""
ORPHAN_S = 1.0
"""How often a process looks whether its launcher is there."""
SET_DEATH_SIGNAL, GET_DEATH_SIGNAL = 1, 2
"""Options of Linux's `prctl`: the signal that a process gets when its parent ends."""
LAUNCHERS = re.compile(
    r"(accelerate|longctx)(-launch)?|accelerate\.commands\..+|longctx_patch\.cli\..+"
)
"""Names of the programs and modules that start processes of a job."""


def born_at(pid: int | None = None) -> float:
    """When a process was started: with its number it names a process, as numbers come again."""
    return float(psutil.Process(pid).create_time())


def state_of(pid: int, born: float) -> State:
    """Whether a process of this machine runs, was stopped by a signal, or has ended."""
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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_children() -> None:
    """End what this process has started, such as workers that read data."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def launcher() -> int | None:
    """The process of torch's, Accelerate's or our launcher that started this one; None where
    another one did, such as a shell, which may end before what it has started. `GONE` where it was
    torch's and has ended already."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return GONE if _adopts(parent) else parent
    with contextlib.suppress(psutil.Error):
        words = [PurePath(word).name for word in psutil.Process(parent).cmdline()[:6]]
        is_python = any(word.startswith("python") for word in words[:1])
        if any(LAUNCHERS.fullmatch(word) for word in (words if is_python else words[:1])):
            return parent
    return None


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


def die_with_launcher() -> None:
    """Where the system ends this process when the one that forked it has gone, have it end it also
    if it was stopped by a signal: torch asks for SIGINT, which such a process never gets."""
    if sys.platform != "linux":
        return
    system, asked = ctypes.CDLL(None), ctypes.c_int()
    system.prctl(GET_DEATH_SIGNAL, ctypes.byref(asked))
    if asked.value:
        system.prctl(SET_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))


def _adopts(pid: int) -> bool:
    """Whether a process is one that gets the children of those that end, and no launcher: process 1
    may be one, in a container."""
    try:
        process = psutil.Process(pid)
        return (pid == 1 or process.name() == "systemd") and "python" not in process.exe()
    except psutil.Error:  # somebody else's
        return True
