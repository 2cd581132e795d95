"""Which errors of libraries say that a disk takes no more: each has another type and words."""

import errno
import re
from typing import NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Numbers of errors by which a system says that nothing more can be written."""
TOLD = re.compile(r"os error (\d+)\)|\[Errno (\d+)\]")
"""An error's number in the words of safetensors, and of Python."""
TORCHS_WORDS = ("PytorchStreamWriter failed writing", "inline_container.cc")
"""Of an error without a number, by which torch says that a file was cut short."""


class Refusal(NamedTuple):
    """What a disk did not take."""

    rank: int
    number: int
    """Of the system's error; 0 if nobody has told."""
    error: BaseException


def refusal_in(error: BaseException, rank: int) -> Refusal | None:
    """What an error of `rank`, or one that it comes from, says of a disk; None for others."""
    if isinstance(error, ValueError):  # which says itself what to do
        return None
    if isinstance(error, CheckpointException):  # its own words are those of all ranks
        failures = sorted(error.failures.items())
        return next(filter(None, (refusal_in(each, where) for where, (each, _) in failures)), None)
    context = None if error.__suppress_context__ else error.__context__
    inner = [each for each in (error.__cause__, context) if each is not None]
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := TOLD.search(str(error))):
        number = int(told[1] or told[2])
    if number is not None and number in REFUSED:
        return Refusal(rank, number, error)
    found = next(filter(None, (refusal_in(each, rank) for each in inner)), None)
    if found is None and any(word in str(error) for word in TORCHS_WORDS):
        return Refusal(rank, 0, error)
    return found
