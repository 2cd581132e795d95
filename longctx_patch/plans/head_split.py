"""Says which heads each rank of a Ulysses group computes, and what their exchange sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.layout import Interval, even_cuts


class Heads(Enum):
    """Kind of the heads that a tensor has."""

    QUERY = "query"
    KEY_VALUE = "key_value"


QKV = (Heads.QUERY, Heads.KEY_VALUE, Heads.KEY_VALUE)
"""Kinds of the heads of q, k and v, in this order; their gradients have the same."""


def halves(num_heads: int, num_kv_heads: int) -> tuple[tuple[slice, slice], ...]:
    """(query heads, key-value heads) of both halves: key-value heads with their query heads, one
    more in the first where their number is odd; a single one serves both halves."""
    if num_kv_heads == 1:
        middle, both = num_heads // 2, slice(0, 1)
        return (slice(0, middle), both), (slice(middle, num_heads), both)
    middle, group = -(-num_kv_heads // 2), num_heads // num_kv_heads
    edges = ((0, middle), (middle, num_kv_heads))
    return tuple((slice(a * group, b * group), slice(a, b)) for a, b in edges)


@dataclass(frozen=True)
class HeadSplit:
    """Says which heads each rank of a Ulysses group computes, and what their exchange sends."""

    num_heads: int
    num_kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        if self.num_heads < self.degree:
            raise ValueError(
                f"ulysses_degree={self.degree}, but the model has {self.num_heads} query heads and "
                f"each rank needs one. Use ulysses_degree <= {self.num_heads} and a larger "
                "ring_degree."
            )

    @cached_property
    def query(self) -> tuple[Interval, ...]:
        """The query heads of each rank."""
        return tuple(even_cuts(self.num_heads, self.degree))

    @cached_property
    def key_value(self) -> tuple[Interval, ...]:
        """The key-value heads that each rank's query heads need; ranks may share some."""
        group = self.num_heads // self.num_kv_heads
        return tuple(Interval(q.start // group, (q.stop - 1) // group + 1) for q in self.query)

    def of(self, heads: Heads) -> tuple[Interval, ...]:
        return self.query if heads is Heads.QUERY else self.key_value

    def kv_runs(self, rank: int) -> tuple[Interval, ...] | None:
        """The local query heads of each local key-value head, or None where they group evenly."""
        group = self.num_heads // self.num_kv_heads
        q, kv = self.query[rank], self.key_value[rank]
        runs = tuple(
            q.intersect(Interval(head * group, (head + 1) * group)).shift(-q.start)
            for head in range(kv.start, kv.stop)
        )
        return None if len({run.size for run in runs}) == 1 else runs

    def num_kv_computed(self, rank: int) -> int:
        """Number of key-value heads that a rank's kernel sees."""
        return self.key_value[rank].size if self.kv_runs(rank) is None else self.query[rank].size


def to_heads_traffic(
    split: HeadSplit, heads: Sequence[Heads], rank: int, *, tokens: int, bytes_per_head: int
) -> Traffic:
    """The traffic of one rank that gets all ranks' tokens of its own heads.

    Args:
        split: the heads that each rank of the Ulysses group computes.
        heads: the kinds of heads of the tensors that travel together.
        rank: the sender's rank in the Ulysses group.
        tokens: the sender's tokens.
        bytes_per_head: bytes of one token's head, over the batch.
    """
    sizes = [
        tokens * bytes_per_head * sum(split.of(kind)[other].size for kind in heads)
        for other in range(split.degree)
        if other != rank
    ]
    return _total(sizes)


def to_tokens_traffic(
    split: HeadSplit,
    heads: Sequence[Heads],
    rank: int,
    *,
    sizes: Sequence[int],
    bytes_per_head: int,
) -> Traffic:
    """The traffic of one rank on the way back; `sizes` are the tokens of each rank of the group."""
    mine = sum(split.of(kind)[rank].size for kind in heads)
    return _total(
        [size * bytes_per_head * mine for other, size in enumerate(sizes) if other != rank]
    )


def _total(sizes: Sequence[int]) -> Traffic:
    return Traffic(sum(1 for size in sizes if size), sum(sizes))
