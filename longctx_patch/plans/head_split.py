"""Which heads each rank of a Ulysses group computes, and in which wave."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

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
    """Which heads each rank of a Ulysses group computes, all at once or in one of several waves."""

    num_heads: int
    num_kv_heads: int
    degree: int
    wave: int = 0
    num_waves: int = 1

    def __post_init__(self) -> None:
        if self.num_heads < self.degree:
            raise ValueError(
                f"ulysses_degree={self.degree}, but the model has {self.num_heads} query heads and "
                f"each rank needs one. Use ulysses_degree <= {self.num_heads} and a larger "
                "ring_degree."
            )

    def in_waves(self, most: int) -> "tuple[HeadSplit, ...]":
        """The same heads in at most `most` parts; each rank has heads in every part."""
        count = min(most, self.num_heads // self.degree) if self.degree > 1 else 1
        return tuple(replace(self, wave=wave, num_waves=count) for wave in range(count))

    @cached_property
    def query(self) -> tuple[Interval, ...]:
        """The query heads of each rank in this wave."""
        return tuple(self._of_wave(heads) for heads in even_cuts(self.num_heads, self.degree))

    def _of_wave(self, heads: Interval) -> Interval:
        """This wave's part of a rank's query heads: those of whole key-value heads, if there are
        enough."""
        group = self.num_heads // self.num_kv_heads
        whole = heads.start % group == heads.stop % group == 0
        unit = group if whole and heads.size >= group * self.num_waves else 1
        part = even_cuts(heads.size // unit, self.num_waves)[self.wave]
        return Interval(heads.start + part.start * unit, heads.start + part.stop * unit)

    @cached_property
    def key_value(self) -> tuple[Interval, ...]:
        """The key-value heads that each rank's query heads need; ranks and waves may share some."""
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
