"""Says what to do where a disk takes no more: what was not written, what is whole, how to go on.
Libraries raise errors of other types and words for it."""

import errno
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from longctx_patch.rules.together import own_rank

from .series import Series

REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Numbers of errors by which a system says that nothing more can be written."""
TOLD = re.compile(r"os error (\d+)\)|\[Errno (\d+)\]")
"""An error's number in the words of safetensors, and of Python."""
TORCHS_WORDS = ("PytorchStreamWriter failed writing", "inline_container.cc")
"""Torch says by these words, in an error without a number, that a file was cut short."""


class CantWriteError(ValueError):
    """The disk of an output is full, or takes no files."""


class SavingError(RuntimeError):
    """A rank has failed while a checkpoint was read or written."""


class Refusal(NamedTuple):
    """Says what a disk did not take."""

    rank: int
    number: int
    """The number of the system's error; 0 where none is known."""
    error: BaseException


@contextmanager
def explained_disk(output: Path, checkpoints: Series) -> Iterator[None]:
    """Raise CantWriteError in place of what libraries raise within the block where a disk is full:
    none of their errors says what is left to go on from. What else torch's checkpoints raise, on
    all ranks and as no `Exception`, becomes a SavingError.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        found = refusal_in(error, own_rank())
        if found is not None:
            raise CantWriteError(_words(found, error, output, checkpoints)) from None
        if isinstance(error, CheckpointException) and error.failures:
            raise SavingError(_unsaved(error, output)) from error
        raise


def refusal_in(error: BaseException, rank: int) -> Refusal | None:
    """Returns what an error of `rank`, or its cause, says of a disk; None for others."""
    if isinstance(error, ValueError):  # which says itself what to do
        return None
    if isinstance(error, CheckpointException):  # its own words are those of all ranks
        failures = sorted(error.failures.items())
        return next(filter(None, (refusal_in(each, where) for where, (each, _) in failures)), None)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := TOLD.search(str(error))):
        number = int(told[1] or told[2])
    if number is not None and number in REFUSED:
        return Refusal(rank, number, error)
    context = None if error.__suppress_context__ else error.__context__
    inner = [each for each in (error.__cause__, context) if each is not None]
    found = next(filter(None, (refusal_in(each, rank) for each in inner)), None)
    if found is None and any(word in str(error) for word in TORCHS_WORDS):
        return Refusal(rank, 0, error)
    return found


def _words(found: Refusal, raised: BaseException, output: Path, checkpoints: Series) -> str:
    traced = (_file_of(error, output) for error in (found.error, raised))
    file = getattr(found.error, "filename", None) or next(filter(None, traced), "")
    why = os.strerror(found.number) if found.number else "torch's file was cut short"
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    disk = shutil.disk_usage(place)
    whole = [each.path for each in checkpoints.complete()]
    left = f"{whole[-1]} is whole" if whole else "no checkpoint is whole yet"
    how = "with --resume" if whole else "anew, with --resume auto"
    room = "Make room (--keep-last N, or --save_total_limit N over TRL, deletes old checkpoints)"
    advice = "Make it writable" if found.number == errno.EROFS else room
    return (
        f"rank {found.rank} could not write {file or f'a file below {output}'}: {why}. On the disk "
        f"of {output} {disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB are free, and {left}."
        f" {advice}, and go on {how}."
    )


def _unsaved(error: CheckpointException, output: Path) -> str:
    """Returns which rank it was, in one line."""
    rank, (cause, _) = min(error.failures.items())
    file = _file_of(error, output) or f"a checkpoint below {output}"
    return f"rank {rank} failed in saving or reading {file}: {type(cause).__name__}: {cause}"


def _file_of(error: BaseException, output: Path) -> str:
    """Returns where the innermost call that knew a place below the output was writing; libraries
    leave it out of their errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, str | Path) and str(value).startswith(f"{output}{os.sep}"):
                return str(value)
    return ""
