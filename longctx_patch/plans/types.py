"""The data types of a plan.

A plan is a list of steps that all ranks of a group walk through together. In each step

1. the step's transfers are posted; a transfer sends what its source holds when the step begins,
2. the step's works are computed, from what their rank held when the step began,
3. the transfers are waited for; what has arrived can be used from the next step on.

Every rank starts with its own blocks. Operands (`KV`) land in numbered buffers. Gradients (`DKV`)
are *moved and added*: the source gives up its partial sum for the owner's rows, and it is added
to the destination's partial sum. A plan ends with every partial sum at its owner.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Mask, Piece


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Operand(Enum):
    """What a transfer carries."""

    KV = "kv"
    """Keys and values, in the dtype of the model."""

    DKV = "dkv"
    """Partial gradients of keys and values, in the dtype of accumulation (float32 or wider)."""


class Block(NamedTuple):
    """Rows of one rank's tensors; `rows` are slots of the owner."""

    operand: Operand
    owner: int
    rows: Interval


class Transfer(NamedTuple):
    """One message."""

    source: int
    destination: int
    block: Block
    buffer: int | None
    """Where an operand lands at the destination; None for gradients, which are added."""


class Work(NamedTuple):
    """Attention of some rows of `q_owner` to some rows of `kv_owner`, computed on `rank`.

    The pieces are in slots: rows of `q_owner`, columns of `kv_owner`.
    """

    rank: int
    q_owner: int
    kv_owner: int
    pieces: tuple[Piece, ...]

    @property
    def area(self) -> int:
        return sum(piece.area for piece in self.pieces)


@dataclass(frozen=True)
class Step:
    """What all ranks do between two waits."""

    transfers: tuple[Transfer, ...] = ()
    works: tuple[Work, ...] = ()


class RankStep(NamedTuple):
    """One rank's part of a step."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Plan:
    """A schedule of one direction of attention over the ranks of a layout."""

    name: str
    direction: Direction
    layout: Layout
    mask: Mask
    steps: tuple[Step, ...]

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @cached_property
    def rank_steps(self) -> tuple[tuple[RankStep, ...], ...]:
        """By rank: the plan as that rank sees it, in the plan's order on both ends of a link."""
        return tuple(
            tuple(
                RankStep(
                    tuple(t for t in step.transfers if t.source == rank),
                    tuple(t for t in step.transfers if t.destination == rank),
                    tuple(w for w in step.works if w.rank == rank),
                )
                for step in self.steps
            )
            for rank in range(self.num_ranks)
        )

    @cached_property
    def num_buffers(self) -> tuple[int, ...]:
        """Operand buffers that each rank needs."""
        counts = [0] * self.num_ranks
        for step in self.steps:
            for transfer in step.transfers:
                if transfer.buffer is not None:
                    counts[transfer.destination] = max(
                        counts[transfer.destination], transfer.buffer + 1
                    )
        return tuple(counts)
