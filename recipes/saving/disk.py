"""What is said where a disk takes no more: what was not written, what is whole, how to go on."""

import errno
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from longctx_patch.checkpoints.choosing import complete
from longctx_patch.checkpoints.full_disk import Refusal, refusal_in
from longctx_patch.checkpoints.names import Series
from longctx_patch.plugin.together import own_rank


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
        found = refusal_in(error, own_rank())
        if found is not None:
            raise CantWriteError(_words(found, error, output, checkpoints)) from None
        if isinstance(error, CheckpointException) and error.failures:
            raise SavingError(_unsaved(error, output)) from error
        raise


def _words(found: Refusal, raised: BaseException, output: Path, checkpoints: Series) -> str:
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
