"""One job for one output: a file in it says who writes there, and since when.

Process 0 holds the system's lock on the file while it lives, and touches the file every few
seconds. So three things tell that a job is over: on a local disk the lock is free; of a process of
this machine the system says whether it lives; a job of another machine has not touched the file for
`STALE_S`. Clocks of machines need to agree to within a minute.

Only a file is taken for a lock: a link, which somebody else may have left there, is not followed.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from longctx_patch.plugin.together import of_all_ranks, own_rank, refuse_together

LOCK_FILE = ".lock"
BEAT_S = 10.0
"""Seconds between two touches."""
STALE_S = 120.0
"""A file that was not touched for so long belongs to a job that is over."""
CLOCKS_S = 60.0
"""How far clocks of machines may be apart."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a job, as its machine knows it."""

    host: str
    pid: int
    started: float
    """Seconds since the epoch: another process that has the same number later began later."""

    @classmethod
    def own(cls) -> "Process":
        started = psutil.Process().create_time()
        return cls(host=socket.gethostname(), pid=os.getpid(), started=started)

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def lives(self) -> bool:
        """Whether a process of this machine still runs."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) < 1
            return same and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who holds an output: all processes of a job, process 0 first."""

    processes: list[Process]
    launched: float
    """Seconds since the epoch."""

    def holder(self, silent_s: float) -> Process | None:
        """A process that may still write, None if the job is over.

        Args:
            silent_s: seconds since the file was touched.
        """
        here = [each for each in self.processes if each.is_here]
        alive = next((each for each in here if each.lives()), None)
        if alive is not None or self.processes[0].is_here:
            return alive
        return self.processes[0] if silent_s < STALE_S else None


def check_free(folder: Path) -> None:
    """Raise ValueError if a job writes there now. Changes nothing."""
    job, holder = job_of(folder)
    if holder is not None:
        raise ValueError(_refusal(folder, job, holder))


def job_of(folder: Path) -> tuple[Job | None, Process | None]:
    """(the job that the lock file names, a process of it that may still write there). Raises
    ValueError where something else than a file is in its place."""
    path = folder / LOCK_FILE
    if odd := _no_file(path):
        raise ValueError(odd)
    job = _read(path)
    return job, job.holder(_silent_s(path)) if job else None


@contextmanager
def held(folder: Path, *, launched: float, say: Callable[[str], object]) -> Iterator[None]:
    """Hold the output's lock within the block; every process calls this.

    Makes the folder, and takes it away again if the block leaves it empty. The lock of a job that
    is over is taken over, and `say` is told. Raises ValueError on all processes if another job
    holds it.
    """
    processes = of_all_ranks(Process.own())
    job = Job(processes=processes, launched=launched)
    lock = _Lock(folder, say) if own_rank() == 0 else None
    refuse_together([lock.take(job)] if lock else ())
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class _Lock:
    """Process 0's part."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._folder, self._say = folder, say
        self._path = folder / LOCK_FILE
        self._made: list[Path] = []
        self._file: IO[bytes] | None = None
        self._ends = threading.Event()

    def take(self, job: Job) -> str:
        """Take the lock; returns why it can't be had."""
        self._make_folder()
        if odd := _no_file(self._path):
            return odd
        self._file = _opened(self._path)
        if self._file is None:
            other = _read(self._path)
            return _refusal(self._folder, other, other.processes[0] if other else None)
        other = _read(self._path)
        if other is not None:
            holder = other.holder(_silent_s(self._path))
            if holder is not None:
                self._file.close()
                self._file = None
                return _refusal(self._folder, other, holder)
            self._say(f"the lock of a job that is over is taken over: {_words(other)}")
        self._file.truncate(0)
        self._file.write(json.dumps(asdict(job)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        threading.Thread(target=self._beat, name="lock of the output", daemon=True).start()
        return ""

    def release(self) -> None:
        """Give the lock back, and remove folders that were made for it and hold nothing."""
        self._ends.set()
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
        for folder in reversed(self._made):
            with suppress(OSError):  # there are files in it
                folder.rmdir()

    def _make_folder(self) -> None:
        missing = [self._folder, *self._folder.parents]
        self._made = [folder for folder in reversed(missing) if not folder.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            with suppress(OSError):  # the disk is away for a while
                os.utime(self._path)


def _opened(path: Path) -> IO[bytes] | None:
    """The lock file, with the system's lock on it; None if another process has that."""
    while True:
        file = open(path, "ab", opener=_no_link)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            return file  # a disk without locks: what the file says has to do
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()  # a job that ended has removed it meanwhile


def _no_link(path: str, flags: int) -> int:
    """Open a file: neither one that a link leads to, nor a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _no_file(path: Path) -> str:
    """Why what is in the place of a lock file is none, in words."""
    if path.is_symlink():
        what = f"a link to {path.readlink()}"
    elif path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
    else:
        return ""
    return (
        f"output {str(path.parent)!r}: {path.name} is {what}, and is left as it is. A run writes a "
        "file of that name, which says who writes there: remove it, or give another --output."
    )


def _read(path: Path) -> Job | None:
    """Who is named in a lock file; None without one, or where it was cut off by a kill."""
    try:
        with open(path, encoding="utf-8", opener=_no_link) as file:
            content: dict[str, Any] = json.load(file)
        processes = [Process(**each) for each in content["processes"]]
        return Job(processes=processes, launched=content["launched"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _silent_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _refusal(folder: Path, job: Job | None, holder: Process | None) -> str:
    who = f"process {holder.pid} on {holder.host}" if holder else "another process"
    since = f", of the job {_words(job)}," if job else ""
    path = folder / LOCK_FILE
    if (ahead_s := -_silent_s(path)) > CLOCKS_S:
        return (
            f"output {str(folder)!r} may be in use: the last sign of {who}{since} is "
            f"{ahead_s:.0f} seconds ahead of this machine's clock. Set the clocks; if that job is "
            f"gone, delete {path}."
        )
    return (
        f"output {str(folder)!r} is in use: {who}{since} writes there. Wait for that job or end "
        f"it, or give another --output. (A job that is gone from another machine is taken over "
        f"{STALE_S:.0f} seconds after its last sign.)"
    )


def _words(job: Job) -> str:
    first = job.processes[0]
    age = max(0, time.time() - job.launched)
    return f"of process {first.pid} on {first.host}, launched {_ago(age)}"


def _ago(seconds: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {name}{'s' if number > 1 else ''} ago"
    return f"{int(seconds)} seconds ago"
