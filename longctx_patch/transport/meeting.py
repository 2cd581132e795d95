"""Lets ranks compare what they hold, before anything is sent that could hang.

All meetings look alike on the wire: equally many numbers, of which the first says which meeting it
is. So ranks at different points of a program notice it, instead of waiting for each other or
mistaking one meeting for another. A rank that refuses its own input still comes to the meeting and
says so; then all ranks raise, with its reason. Meetings are control, not data, so counters leave
them out.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NoReturn, TypeVar

from longctx_patch.transport.protocol import Transport

Found = TypeVar("Found")

_WIDTH = 16


class SequenceParallelismError(RuntimeError):
    """Attention did not run as it was planned."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"sequence parallelism did not run as planned: {problem}. Something replaced the "
            "patched attention or checkpointing after patch() (set_attn_implementation, "
            "gradient_checkpointing_enable, another patch, a compiled graph)? Patch last, or "
            "handle.unpatch() and patch again."
        )


class Meeting(IntEnum):
    """The occasions on which ranks meet."""

    BATCH = 1
    LAYER = 2
    LABELS = 3
    KERNEL = 4
    PREFLIGHT = 5
    ATTENTION = 6
    CONFIG = 7


_REFUSALS = (ValueError, SequenceParallelismError)  # the later one is graver

_WAITED = (
    "This happened where the ranks that share a row meet ({meeting}). If another rank has failed, "
    "its own error says why. If it has not, it never came here: these ranks compute together, so "
    "all of them call the model. For a pass of one rank alone, call model.eval() before it, and "
    "model.train() after it."
)


def meet(
    everyone: Transport,
    meeting: Meeting,
    numbers: Sequence[int] = (),
    problem: ValueError | SequenceParallelismError | None = None,
) -> list[tuple[int, ...]]:
    """Every rank's numbers, by rank. Collective over `everyone`.

    Args:
        numbers: equally many on every rank, 14 at most, each of 64 bits.
        problem: why this rank refuses to go on.

    Raises:
        SequenceParallelismError: on every rank, if ranks have come to different meetings, or if
            the `problem` of some rank is such an error.
        ValueError: on every rank, if the `problem` of some rank is such an error: that rank raises
            its own, the others raise one that repeats it.
        RuntimeError: as torch.distributed does, such as after its time limit; with a note.
    """
    kind = 0 if problem is None else 1 + isinstance(problem, SequenceParallelismError)
    fill = [0] * (_WIDTH - 2 - len(numbers))
    try:
        rows = everyone.all_gather_numbers((meeting, kind, *numbers, *fill))
    except RuntimeError as error:
        error.add_note(_WAITED.format(meeting=meeting.name))
        raise
    if any(row[0] != meeting for row in rows):
        there = ", ".join(f"rank {rank}: {Meeting(row[0]).name}" for rank, row in enumerate(rows))
        raise SequenceParallelismError(f"the ranks of the group are at different points ({there})")
    if any(row[1] for row in rows):
        _raise_together(everyone, [row[1] for row in rows], problem)
    return [row[2 : 2 + len(numbers)] for row in rows]


def tried(everyone: Transport, meeting: Meeting, read: Callable[[], Found]) -> Found:
    """Returns what `read` returns, before a meeting. Where it raises, this rank comes to the
    meeting and says so: all ranks raise then, as `meet` does."""
    try:
        return read()
    except _REFUSALS as error:
        problem = error
    except Exception as error:  # whatever it is, the other ranks must learn of it, not wait
        problem = ValueError(f"what this rank was given can't be read: {error!r}")
    meet(everyone, meeting, problem=problem)
    raise problem


def _raise_together(
    everyone: Transport,
    kinds: Sequence[int],
    problem: ValueError | SequenceParallelismError | None,
) -> NoReturn:
    """Raise the gravest problem: this rank's own if it is one of those, else the first rank's."""
    reasons = _texts(everyone, str(getattr(problem, "problem", problem or "")))
    gravest = max(kinds)
    if problem is not None and kinds[everyone.group_rank] == gravest:
        raise problem
    rank = kinds.index(gravest)
    raise _REFUSALS[gravest - 1](f"rank {rank} of the group refused: {reasons[rank]}")


def digest(text: str) -> int:
    """63 bits that tell texts apart, so that ranks can compare them in a meeting."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def table(everyone: Transport, mine: str) -> str:
    """Writes what each rank says of itself, a line for each. Collective over `everyone`.

    It is for errors: all ranks call it, once all know from a meeting that they will raise.
    """
    texts = _texts(everyone, mine)
    return "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))


def _texts(everyone: Transport, mine: str) -> list[str]:
    """Every rank's text, by rank: gather the lengths, then the bytes, one in each number."""
    data = mine.encode()
    longest = 1 + max(size for (size,) in everyone.all_gather_numbers((len(data),)))
    rows = everyone.all_gather_numbers(tuple(data.ljust(longest, b"\0")))
    return [bytes(row).rstrip(b"\0").decode() for row in rows]
