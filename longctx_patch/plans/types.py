"""The data types of a plan.

A plan is a list of steps that all ranks of a group walk through together. In each step

1. the step's transfers are posted; a transfer sends what its source holds when the step begins,
2. the step's works are computed, from what their rank held when the step began,
3. the transfers are waited for; what has arrived can be used from the next step on.

Every rank starts with its own inputs. Inputs of others land in numbered buffers. Results are *moved
and added*: the source gives up its partial result for the owner's rows, and it is added to (for
`OUT`: merged with) the destination's. A plan ends with every partial result at its owner.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from longctx_patch.sequence.layout import Interval, Layout, Rows
from longctx_patch.sequence.masks import Mask
from longctx_patch.sequence.regions import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Operand(Enum):
    """Names what a transfer carries. `AttentionShape.block_bytes` gives the sizes."""

    KV = "kv"
    """Input: keys and values, in the dtype of the model."""

    Q = "q"
    """Input: queries, for a rank that computes forward for another."""

    Q_BACKWARD = "q_backward"
    """Input: queries, dout, lse and delta, for a rank that computes backward for another."""

    OUT = "out"
    """Result: normalised output in the dtype of the model, and its lse."""

    DQ = "dq"
    """Result: gradient of queries as one kernel call wrote it, in the dtype of the model."""

    DKV = "dkv"
    """Result: gradients of keys and values as one kernel call wrote them."""

    DQ_SUM = "dq_sum"
    """Result: gradient of queries from several calls, in the dtype of accumulation."""

    DKV_SUM = "dkv_sum"
    """Result: gradients of keys and values from several calls, in the dtype of accumulation."""

    @property
    def is_input(self) -> bool:
        return self in (Operand.KV, Operand.Q, Operand.Q_BACKWARD)

    @property
    def is_of_keys(self) -> bool:
        """Says whether its rows are those of keys and values."""
        return self in (Operand.KV, Operand.DKV, Operand.DKV_SUM)

    @property
    def is_sum(self) -> bool:
        return self in (Operand.DQ_SUM, Operand.DKV_SUM)

    @property
    def partial(self) -> "Operand":
        """The partial result that a transfer moves, whether as a sum or a single contribution."""
        return {Operand.DQ_SUM: Operand.DQ, Operand.DKV_SUM: Operand.DKV}.get(self, self)


EVERYONE = -1
"""Stands for the owner where the keys are those of all ranks, gathered in the order of tokens."""


class Share(NamedTuple):
    """One of `parts` groups of heads, key-value heads with their query heads."""

    part: int
    parts: int

    def range(self, num_heads: int, num_kv_heads: int) -> Interval:
        """The heads of this group, among `num_heads` heads of queries or of keys."""
        group = num_heads // num_kv_heads
        start, stop = (num_kv_heads * n // self.parts for n in (self.part, self.part + 1))
        return Interval(start * group, stop * group)

    def cut(self, tensor: "Tensor", num_kv_heads: int) -> "Tensor":
        """A view of this group's heads in a tensor that has all heads along dim 2."""
        if self.parts == 1:
            return tensor
        heads = self.range(tensor.shape[2], num_kv_heads)
        return tensor[:, :, heads.start : heads.stop]


ALL_HEADS = Share(0, 1)


class Block(NamedTuple):
    """Rows of one rank's tensors, packed; `rows` are slots of the owner."""

    operand: Operand
    owner: int
    rows: Rows
    heads: Share = ALL_HEADS


class Transfer(NamedTuple):
    """One message from rank to rank."""

    source: int
    destination: int
    block: Block
    buffer: int | None
    """Where an input lands at the destination; None for results, which are added."""


class Work(NamedTuple):
    """A tile: attention of rows of `q_owner` to rows of `kv_owner`, which `rank` computes.

    The pieces are in slots: rows of `q_owner`, columns of `kv_owner`. Where that is `EVERYONE`, the
    columns are tokens.
    """

    rank: int
    q_owner: int
    kv_owner: int
    pieces: tuple[Piece, ...]
    heads: Share = ALL_HEADS

    @property
    def area(self) -> int:
        return sum(piece.area for piece in self.pieces)

    @property
    def q_rows(self) -> Rows:
        """The rows of `q_owner` that are used."""
        return Rows.of(piece.q for piece in self.pieces)

    @property
    def kv_rows(self) -> Rows:
        """The rows of `kv_owner` that are used."""
        return Rows.of(piece.kv for piece in self.pieces)


@dataclass(frozen=True)
class Step:
    """The works and transfers of all ranks between two waits."""

    transfers: tuple[Transfer, ...] = ()
    works: tuple[Work, ...] = ()

    def by_rank(self, num_ranks: int) -> list["RankStep"]:
        """The part of each rank."""
        sends: list[list[Transfer]] = [[] for _ in range(num_ranks)]
        receives: list[list[Transfer]] = [[] for _ in range(num_ranks)]
        works: list[list[Work]] = [[] for _ in range(num_ranks)]
        for transfer in self.transfers:
            sends[transfer.source].append(transfer)
            receives[transfer.destination].append(transfer)
        for work in self.works:
            works[work.rank].append(work)
        return [
            RankStep(tuple(sends[rank]), tuple(receives[rank]), tuple(works[rank]))
            for rank in range(num_ranks)
        ]


class RankStep(NamedTuple):
    """One rank's part of a step."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    works: tuple[Work, ...]

    def only(self, *, inputs: bool) -> "RankStep":
        """The same step with its messages of inputs alone, or of results alone."""
        return self._replace(
            sends=tuple(t for t in self.sends if t.block.operand.is_input is inputs),
            receives=tuple(t for t in self.receives if t.block.operand.is_input is inputs),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule of one direction of attention, as steps over the ranks of a layout."""

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
        """The steps of each rank. Both ends of a link have its messages in the plan's order."""
        by_step = [step.by_rank(self.num_ranks) for step in self.steps]
        return tuple(tuple(ranks[rank] for ranks in by_step) for rank in range(self.num_ranks))

    @cached_property
    def rank_messages(self) -> tuple[tuple[tuple[RankStep, RankStep], ...], ...]:
        """The messages of inputs and those of results, for each rank and step."""
        return tuple(
            tuple((step.only(inputs=True), step.only(inputs=False)) for step in program)
            for program in self.rank_steps
        )

    @cached_property
    def moved(self) -> frozenset[Operand]:
        """The operands that transfers carry."""
        return frozenset(t.block.operand for step in self.steps for t in step.transfers)

    @cached_property
    def num_head_groups(self) -> int:
        """Number of groups of heads that the plan computes one after another."""
        return max((w.heads.parts for step in self.steps for w in step.works), default=1)
