"""Processes around this one: its launcher, its children, and ranks of the same machine."""

import contextlib
import os
import signal
from pathlib import PurePath
from typing import Literal

import psutil

State = Literal["runs", "stopped", "gone"]


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
    another one did, such as a shell, which may end before what it has started."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(parent).cmdline()
        if any(PurePath(word).name.startswith(("accelerate", "longctx")) for word in words[:3]):
            return parent
    return None
