"""Says which global token sits in which slot of which rank.

A `Layout` holds, for every rank of a group, the half-open intervals of global tokens that fill
its slots in order. Shares may be uneven or empty, so any length works on any number of ranks.
Positions, sharding and unsharding all follow from it; nothing else in the package computes them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from longctx_patch.rules.names import require_choice

if TYPE_CHECKING:  # the methods with tensors load torch: plans and predictions need none
    import torch
    from torch import Tensor

LayoutName = Literal["zigzag", "contiguous", "striped", "balanced"]
"""Placements that have a name. `longctx_patch.sequence.placement` makes each for a row."""


class Interval(NamedTuple):
    """Half-open range of tokens or slots; `step` above 1 takes every step-th token."""

    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return max(0, -(-(self.stop - self.start) // self.step))

    def part(self, inner: "Interval") -> "Interval":
        """The members that `inner` counts, from 0: `Interval(4, 20, 4).part((1, 3))` is 8, 12."""
        start = self.start + inner.start * self.step
        return Interval(start, max(start, start + (inner.size - 1) * self.step + 1), self.step)

    def intersect(self, other: "Interval") -> "Interval":
        """Members of both; for ranges of step 1."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def without(self, other: "Interval") -> "list[Interval]":
        """The parts before and after `other`; for ranges of step 1."""
        before = Interval(self.start, min(self.stop, other.start))
        after = Interval(max(self.start, other.stop), self.stop)
        return [rest for rest in (before, after) if rest.size]

    def members_in(self, tokens: "Interval") -> "Interval":
        """Counts the members from 0, and returns those that lie in a range of step 1."""
        first = max(0, -(-(tokens.start - self.start) // self.step))
        last = min(self.size, -(-(tokens.stop - self.start) // self.step))
        return Interval(first, max(first, last))

    def shift(self, offset: int) -> "Interval":
        return Interval(self.start + offset, self.stop + offset, self.step)


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor, packed one run after another; runs don't touch."""

    runs: tuple[Interval, ...]

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> "Rows":
        """The rows that are in any of the intervals."""
        runs: list[Interval] = []
        for interval in sorted(set(intervals)):
            if runs and interval.start <= runs[-1].stop:
                stop = max(runs[-1].stop, interval.stop)
                runs[-1] = Interval(runs[-1].start, stop)
            elif interval.size:
                runs.append(interval)
        return cls(tuple(runs))

    @classmethod
    def first(cls, size: int) -> "Rows":
        """Rows 0 to `size`."""
        return cls((Interval(0, size),) if size else ())

    @cached_property
    def size(self) -> int:
        return sum(run.size for run in self.runs)

    def place(self, rows: Interval) -> Interval | None:
        """The places of `rows` among the packed rows; None if no run holds all of them."""
        before = 0
        for run in self.runs:
            if run.start <= rows.start and rows.stop <= run.stop:
                return rows.shift(before - run.start)
            before += run.size
        return None

    def covers(self, other: "Rows") -> bool:
        return all(self.place(run) is not None for run in other.runs)

    def __or__(self, other: "Rows") -> "Rows":
        return Rows.of((*self.runs, *other.runs))


@dataclass(frozen=True)
class Layout:
    """Placement of `num_tokens` global tokens over `num_ranks` ranks."""

    intervals: tuple[tuple[Interval, ...], ...]
    """Per rank: the global tokens in its slots, in slot order. Empty intervals are dropped."""

    def __post_init__(self) -> None:
        kept = tuple(tuple(i for i in rank if i.size > 0) for rank in self.intervals)
        object.__setattr__(self, "intervals", kept)
        intervals = sorted(interval for rank in kept for interval in rank)
        assert _cover_each_token(intervals, self.num_tokens), "each token needs one slot"

    @property
    def num_ranks(self) -> int:
        return len(self.intervals)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of slots of each rank."""
        return tuple(sum(i.size for i in rank) for rank in self.intervals)

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)

    def positions(self, rank: int, device: "torch.device | str | None" = None) -> "Tensor":
        """Global positions of one rank's slots: int64 `[size]`."""
        import torch

        parts = [torch.arange(*i, device=device) for i in self.intervals[rank]]
        return torch.cat(parts) if parts else torch.arange(0, device=device)

    def shard(self, tensor: "Tensor", rank: int, dim: int) -> "Tensor":
        """One rank's slots of a tensor that holds all tokens along `dim`."""
        import torch

        if tensor.shape[dim] != self.num_tokens:
            raise ValueError(
                f"tensor has {tensor.shape[dim]} tokens along dim {dim}, but the layout places "
                f"{self.num_tokens}. Build the layout for this length."
            )
        before = (slice(None),) * (dim % tensor.ndim)
        parts = [tensor[(*before, slice(*i))] for i in self.intervals[rank]]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def unshard(self, shards: "Sequence[Tensor]", dim: int) -> "Tensor":
        """All tokens in global order, from every rank's shard."""
        shape = list(shards[0].shape)
        shape[dim] = self.num_tokens
        full = shards[0].new_empty(shape)
        for rank, shard in enumerate(shards):
            full.index_copy_(dim, self.positions(rank, shard.device), shard)
        return full

    def places(self, tokens: Interval) -> list[tuple[int, Interval, Interval]]:
        """Who holds `tokens`: (rank, slots, tokens) of each run, in order of its first token."""
        found = []
        for index in range(bisect_right(self._stops, tokens.start), len(self._runs)):
            held, slots, rank = self._runs[index]
            if held.start >= tokens.stop:
                break
            members = held.members_in(tokens)
            if members.size:
                found.append((rank, members.shift(slots.start), held.part(members)))
        return found

    def run_with(self, *tokens: Interval) -> tuple[int, int] | None:
        """(rank, slot - token) of the gapless run that holds all `tokens`; None if none does."""
        held, slots, rank = self._runs[bisect_right(self._stops, tokens[0].start)]
        for interval in tokens:
            if interval.start < held.start or held.stop < interval.stop:
                return None
        return (rank, slots.start - held.start) if held.step == 1 else None

    def tokens_in(self, rank: int, slots: Interval) -> list[tuple[Interval, Interval]]:
        """(tokens, slots) of each run of a rank that has some of its `slots`."""
        runs = self._runs_of[rank]
        found = []
        for index in range(bisect_right(runs, slots.start, key=lambda run: run[1].stop), len(runs)):
            tokens, filled = runs[index]
            if filled.start >= slots.stop:
                break
            part = filled.intersect(slots)
            found.append((tokens.part(part.shift(-filled.start)), part))
        return found

    @cached_property
    def _runs_of(self) -> tuple[list[tuple[Interval, Interval]], ...]:
        return tuple(slots_of(intervals) for intervals in self.intervals)

    @cached_property
    def _stops(self) -> list[int]:
        """The largest stop of each run and of the runs before it (striped runs overlap)."""
        return list(accumulate((held.stop for held, _, _ in self._runs), max))

    @cached_property
    def _runs(self) -> list[tuple[Interval, Interval, int]]:
        """(tokens, slots, rank) of each interval, in order of the tokens."""
        ranks = enumerate(self.intervals)
        return sorted((*run, rank) for rank, held in ranks for run in slots_of(held))

    def split_each(self, parts: int) -> "Layout":
        """Cut every rank's slots into `parts` runs: the product with Ulysses.

        Rank `r * parts + u` of the result holds run `u` of rank `r`, so the runs of `parts`
        consecutive ranks, joined in order, are the slots that rank `r` had.
        """
        ranks = [
            _slice_slots(intervals, cut)
            for intervals, size in zip(self.intervals, self.sizes, strict=True)
            for cut in even_cuts(size, parts)
        ]
        return Layout(tuple(ranks))


def _cover_each_token(intervals: Sequence[Interval], num_tokens: int) -> bool:
    """Says whether each token has one slot; `intervals` are sorted."""
    if all(interval.step == 1 for interval in intervals):
        starts = [interval.start for interval in intervals]
        return [*starts, num_tokens] == [0, *(interval.stop for interval in intervals)]
    placed = bytearray(num_tokens)
    for interval in intervals:
        placed[slice(*interval)] = bytes([1]) * interval.size
    return bytes(placed) == bytes([1]) * num_tokens


def even_cuts(size: int, parts: int) -> list[Interval]:
    """Cut `[0, size)` into `parts` runs whose sizes differ by one at most."""
    edges = [size * part // parts for part in range(parts + 1)]
    return [Interval(a, b) for a, b in pairwise(edges)]


def contiguous(num_tokens: int, num_ranks: int) -> Layout:
    """Rank `r` holds the `r`-th run of tokens."""
    return Layout(tuple((cut,) for cut in even_cuts(num_tokens, num_ranks)))


def zigzag(num_tokens: int, num_ranks: int) -> Layout:
    """Rank `r` holds the `r`-th from the front and from the back of `2 * num_ranks` runs.

    Every rank then has the same share of a causal mask (the placement of zigzag ring attention).
    """
    cuts = even_cuts(num_tokens, 2 * num_ranks)
    return Layout(tuple((cuts[rank], cuts[-1 - rank]) for rank in range(num_ranks)))


def striped(num_tokens: int, num_ranks: int) -> Layout:
    """Rank `r` holds the tokens `r, r + P, ...` (Striped Attention, Brandon et al. 2023)."""
    return Layout(tuple((Interval(rank, num_tokens, num_ranks),) for rank in range(num_ranks)))


@lru_cache(maxsize=256)
def make_layout(name: LayoutName, num_tokens: int, *, ring: int, ulysses: int = 1) -> Layout:
    """The layout of a (ring x Ulysses) group; Ulysses ranks are consecutive."""
    constructors = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
    require_choice("layout", name, constructors)
    return constructors[name](num_tokens, ring).split_each(ulysses)


def length_multiple(name: LayoutName, *, ring: int, ulysses: int = 1) -> int:
    """Lengths that are a multiple of this give every rank the same number of tokens.

    Zigzag cuts two runs of one length for each rank. Balanced rows need half as much: chunks get
    their lengths once they are assigned to ranks, so that those of each rank add up to its share.
    """
    return (2 if name == "zigzag" and ring > 1 else 1) * ring * ulysses


def slots_of(intervals: Iterable[Interval]) -> list[tuple[Interval, Interval]]:
    """Pairs (global tokens, slots) of one rank's intervals."""
    pairs, slot = [], 0
    for tokens in intervals:
        pairs.append((tokens, Interval(slot, slot + tokens.size)))
        slot += tokens.size
    return pairs


def _slice_slots(intervals: Iterable[Interval], cut: Interval) -> tuple[Interval, ...]:
    return tuple(
        tokens.part(slots.intersect(cut).shift(-slots.start))
        for tokens, slots in slots_of(intervals)
    )
