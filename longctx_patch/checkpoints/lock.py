"""One job for one output: each process of it holds the system's lock on a file there.

The system gives a lock back when its process ends, however it ends. Some disks have no locks, or
none between machines (Lustre and BeeGFS, as they are mounted by default). So process 0 also touches
the file every few seconds, and what another machine has touched within `STALE_S` is in use. Clocks
of machines need to agree to within a minute.

Only a file is taken for a lock: a link, which somebody else may have left there, is not followed.
"""

import fcntl
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from longctx_patch.rules.together import of_all_ranks, own_rank, refuse_together

LOCK_FILE = ".lock"
BEAT_S = 10.0
"""Seconds between two touches."""
STALE_S = 120.0
"""A file that was not touched for so long belongs to a job that is over."""
LOOKS = 10
"""How often a lock is tried: who looks whether it is free has it for a moment."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who holds an output, by its process 0."""

    host: str
    pid: int
    launched: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.launched).astimezone().isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}, launched at {when}"


def check_free(folder: Path) -> None:
    """Raise ValueError if a job writes there now. Changes nothing."""
    job, is_held = job_of(folder)
    if is_held:
        raise ValueError(_refusal(folder, job))


def job_of(folder: Path) -> tuple[Job | None, bool]:
    """(the job that the lock file names, whether it may still write there). Raises ValueError where
    something else than a file is in its place."""
    path = folder / LOCK_FILE
    if odd := _no_file(path):
        raise ValueError(odd)
    try:
        with open(path, "rb", opener=_no_link) as file:
            return _read(path), _is_in_use(file, path)
    except FileNotFoundError:
        return None, False


@contextmanager
def held(folder: Path, *, launched: float, say: Callable[[str], object]) -> Iterator[None]:
    """Hold the output's lock within the block; every process calls this.

    Makes the folder, and takes it away again if the block leaves it empty. The lock of a job that
    is over is taken over, and `say` is told. Raises ValueError on all processes if another job
    holds it.
    """
    job = Job(host=socket.gethostname(), pid=os.getpid(), launched=launched)
    lock, is_main = _Lock(folder), own_rank() == 0
    of_all_ranks(None)  # each of them has looked whether it is free
    refuse_together([lock.take(job, say)] if is_main else ())
    if not is_main:
        lock.join()
    try:
        yield
    finally:
        lock.release()


class _Lock:
    """One process's part."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK_FILE
        self._made: list[Path] = []
        self._file: IO[bytes] | None = None
        self._ends = threading.Event()

    def take(self, job: Job, say: Callable[[str], object]) -> str:
        """Process 0 takes the lock; returns why it can't be had."""
        missing = [self._folder, *self._folder.parents]
        self._made = [folder for folder in reversed(missing) if not folder.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        if odd := _no_file(self._path):
            return odd
        file = _opened(self._path)
        other = _read(self._path)
        if _is_in_use(file, self._path):
            file.close()
            return _refusal(self._folder, other)
        if other is not None:
            say(f"the lock of a job that is over is taken over: of {other}")
        file.truncate(0)
        file.write(json.dumps(asdict(job)).encode())
        file.flush()
        os.fsync(file.fileno())
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)  # the job's other processes hold it as well
        if _read(self._path) != job:  # another one was quicker while it changed
            file.close()
            return _refusal(self._folder, _read(self._path))
        self._file = file
        threading.Thread(target=self._beat, name="lock of the output", daemon=True).start()
        return ""

    def join(self) -> None:
        """Another process holds what process 0 has taken, where it sees it and the disk has
        locks."""
        with suppress(OSError):
            self._file = open(self._path, "rb", opener=_no_link)  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Give the lock back. Process 0 removes the file, and folders that were made for it and
        hold nothing."""
        self._ends.set()
        if self._file is not None:
            if own_rank() == 0:
                self._path.unlink(missing_ok=True)
            self._file.close()
        for folder in reversed(self._made):
            with suppress(OSError):  # there are files in it
                folder.rmdir()

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            with suppress(OSError):  # the disk is away for a while
                os.utime(self._path)


def _opened(path: Path) -> IO[bytes]:
    """The lock file, which is made if it is missing, with the lock if nobody has it."""
    while True:
        file = open(path, "ab", opener=_no_link)  # noqa: SIM115
        if _locks(file) is not True or os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # a job that ended has removed it meanwhile


def _is_in_use(file: IO[bytes], path: Path) -> bool:
    """Says whether a job writes beside an open lock file. Takes the lock if not, where it can."""
    is_free, job = _locks(file), _read(path)
    if is_free is False:
        return True
    if job is None or (is_free and job.host == socket.gethostname()):
        return False
    return time.time() - os.fstat(file.fileno()).st_mtime < STALE_S


def _locks(file: IO[bytes]) -> bool | None:
    """Take the system's lock; returns whether it was free, None where the disk has none."""
    for _ in range(LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(random.uniform(0.05, 0.15))
        except OSError:
            return None
        else:
            return True
    return False


def _no_link(path: str, flags: int) -> int:
    """Open a file: neither one that a link leads to, nor a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _no_file(path: Path) -> str:
    """Says why what is in the place of a lock file is none, in words."""
    if (path.is_file() and not path.is_symlink()) or not os.path.lexists(path):
        return ""
    return (
        f"output {str(path.parent)!r}: {path.name} is no regular file, and is left as it is. A run "
        "writes a file of that name, which says who writes there: remove it, or give another "
        "--output."
    )


def _read(path: Path) -> Job | None:
    """Who is named in a lock file; None without one, or where it was cut off by a kill."""
    try:
        with open(path, encoding="utf-8", opener=_no_link) as file:
            return Job(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def _refusal(folder: Path, job: Job | None) -> str:
    who = f"{job}, or another one of its job," if job else "another process"
    return (
        f"output {str(folder)!r} is in use: {who} writes there. Wait for that job or end it, or "
        f"give another --output. (A job that is gone from another machine is taken over "
        f"{STALE_S:.0f} seconds after it has last touched {folder / LOCK_FILE}, by clocks that "
        "agree. If you know that it is gone, delete that file.)"
    )
