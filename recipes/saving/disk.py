"""What is said where a disk takes no more: what was not written, what is whole, how to go on."""

import errno
import os
import re
import shutil
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from longctx_patch.checkpoints.choosing import complete
from longctx_patch.checkpoints.names import Series
from longctx_patch.plugin.together import own_rank

REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Numbers of errors by which a system says that nothing more can be written."""
TOLD = re.compile(r"os error (\d+)\)|\[Errno (\d+)\]")
"""An error's number in the words of safetensors, and of Python."""
TORCHS_WORDS = ("PytorchStreamWriter failed writing", "inline_container.cc")
"""Of an error without a number, by which torch says that a file was cut short."""

WRITERS = "(_write_files_from_queue)"
"""In the names of torch's threads that write."""
THREADS_END_S = 10.0
"""How long threads may go on that have not noticed yet that the disk is full."""


class CantWriteError(ValueError):
    """The disk of an output is full, or takes no files."""


class SavingError(RuntimeError):
    """A rank has failed while a checkpoint was read or written."""


@contextmanager
def explained_disk(output: Path, checkpoints: Series) -> Iterator[None]:
    """Raise CantWriteError in place of what libraries raise within the block where a disk is full:
    each has another type, and none of them says what is left to go on from. What else torch's
    checkpoints raise, on all ranks and as no `Exception`, becomes a SavingError.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        found = _refusal(error, own_rank())
        if found is not None:
            raise CantWriteError(_words(found, error, output, checkpoints)) from None
        if isinstance(error, CheckpointException) and error.failures:
            raise SavingError(_unsaved(error, output)) from error
        raise


@contextmanager
def quiet_threads() -> Iterator[list[BaseException]]:
    """Collect errors of the threads with which torch writes, in place of their tracebacks. They are
    waited for, as torch does not where its own thread fails."""
    found: list[BaseException] = []
    before, others = threading.excepthook, set(_writers())

    def collect(args: threading.ExceptHookArgs) -> None:
        if args.thread in others or WRITERS not in getattr(args.thread, "name", ""):
            before(args)
        elif args.exc_value is not None:
            found.append(args.exc_value)

    threading.excepthook = collect
    try:
        yield found
    finally:
        for thread in set(_writers()) - others:
            thread.join(THREADS_END_S)
        threading.excepthook = before


def _writers() -> Iterator[threading.Thread]:
    return (thread for thread in threading.enumerate() if WRITERS in thread.name)


def unwritten(path: Path, errors: Sequence[BaseException]) -> OSError:
    """One error for those of threads that have written to `path`, for other ranks as well."""
    found = next(filter(None, (_refusal(each, 0) for each in errors)), None)
    if found is not None and found.number:
        return OSError(found.number, os.strerror(found.number), str(path))
    return OSError(f"states could not be written to {path}: {next(iter(errors), 'no error')}")


class _Refusal(NamedTuple):
    """What a disk did not take."""

    rank: int
    number: int
    """Of the system's error; 0 if nobody has told."""
    error: BaseException


def _refusal(error: BaseException, rank: int) -> _Refusal | None:
    """None for other errors."""
    if isinstance(error, ValueError):  # which says itself what to do
        return None
    if isinstance(error, CheckpointException):  # its own words are those of all ranks
        failures = sorted(error.failures.items())
        return next(filter(None, (_refusal(each, where) for where, (each, _) in failures)), None)
    context = None if error.__suppress_context__ else error.__context__
    inner = [each for each in (error.__cause__, context) if each is not None]
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := TOLD.search(str(error))):
        number = int(told[1] or told[2])
    if number is not None and number in REFUSED:
        return _Refusal(rank, number, error)
    found = next(filter(None, (_refusal(each, rank) for each in inner)), None)
    if found is None and any(word in str(error) for word in TORCHS_WORDS):
        return _Refusal(rank, 0, error)
    return found


def _words(found: _Refusal, raised: BaseException, output: Path, checkpoints: Series) -> str:
    traced = (_file_of(error, output) for error in (found.error, raised))
    file = getattr(found.error, "filename", None) or next(filter(None, traced), "")
    why = os.strerror(found.number) if found.number else "torch's file was cut short"
    free, total = (f"{size / 2**30:.1f}" for size in _space(output))
    whole = [each.path for each in complete(checkpoints)]
    left = f"{whole[-1]} is whole" if whole else "no checkpoint is whole yet"
    how = "with --resume" if whole else "anew, with --resume auto"
    room = "Make room (--keep-last N, or --save_total_limit N over TRL, deletes old checkpoints)"
    advice = "Make it writable" if found.number == errno.EROFS else room
    return (
        f"rank {found.rank} could not write {file or f'a file below {output}'}: {why}. On the disk "
        f"of {output} {free} of {total} GiB are free, and {left}. {advice}, and go on {how}."
    )


def _unsaved(error: CheckpointException, output: Path) -> str:
    """Which rank it was, in one line."""
    rank, (cause, _) = min(error.failures.items())
    file = _file_of(error, output) or f"a checkpoint below {output}"
    return f"rank {rank} failed in saving or reading {file}: {type(cause).__name__}: {cause}"


def _file_of(error: BaseException, output: Path) -> str:
    """Where the innermost call that knew a place below the output was writing; libraries leave it
    out of their errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, str | Path) and str(value).startswith(f"{output}{os.sep}"):
                return str(value)
    return ""


def _space(output: Path) -> tuple[int, int]:
    """(free, all) bytes of the disk."""
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    usage = shutil.disk_usage(place)
    return usage.free, usage.total
