"""Control messages of a sequence group, tagged, so that ranks at different points find it out."""

from collections.abc import Sequence
from enum import IntEnum

from longctx_patch.engine.groups import SequenceGroup

_WIDTH = 16


class SequenceParallelismError(RuntimeError):
    """Attention did not run as it was planned."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"sequence parallelism did not run as planned: {problem}. Something replaced the "
            "patched attention or checkpointing after patch() (set_attn_implementation, "
            "gradient_checkpointing_enable, another patch, a compiled graph)? Patch last, or "
            "handle.unpatch() and patch again."
        )


class Meeting(IntEnum):
    """Where ranks meet in a forward pass."""

    BATCH = 1
    LAYER = 2
    LABELS = 3
    KERNEL = 4  # kernels.agreement meets by itself
    PREFLIGHT = 5


def meet(group: SequenceGroup, meeting: Meeting, mine: Sequence[int]) -> list[tuple[int, ...]]:
    """Everyone's numbers, by rank. All meetings are alike on the wire, so none can be mistaken."""
    fill = [0] * (_WIDTH - 1 - len(mine))
    rows = group.everyone.all_gather_numbers((meeting, *mine, *fill))
    where = [Meeting(row[0]) for row in rows]
    if set(where) != {meeting}:
        there = ", ".join(f"rank {rank}: {place.name}" for rank, place in enumerate(where))
        raise SequenceParallelismError(f"the ranks of the group are at different points ({there})")
    return [row[1 : 1 + len(mine)] for row in rows]
