"""Turns a mask over global tokens into the fewest kernel calls over slots."""

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from longctx_patch.plans.joining import join_pieces, simple_parts
from longctx_patch.plans.types import EVERYONE, Work
from longctx_patch.sequence.layout import Interval, Layout, Rows, slots_of
from longctx_patch.sequence.masks import Mask
from longctx_patch.sequence.regions import Piece, Tile

Ints = NDArray[np.int64]
Pieces = tuple[Piece, ...]
T = TypeVar("T")
NOTHING = 0
"""Kind of the pairs of ranks that have no piece."""


class PieceTable:
    """The pieces of all pairs of ranks under one layout and mask, numbered by kind, and numbers for
    the sets of rows that they use.

    A long causal sequence over thousands of ranks has millions of pairs but three kinds: before,
    on, and after the diagonal.
    """

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self.layout = layout
        self.mask = mask
        self.sizes: Ints = np.array(layout.sizes)
        self._kinds = _Numbers[Pieces](())
        self._rows = _Numbers[Rows](Rows(()))
        self._sides: dict[tuple[int, bool], int] = {}

    def kinds(self, q_owner: Ints, kv_owner: Ints) -> Ints:
        """The kind of each pair: `q_owner`'s queries against `kv_owner`'s keys."""
        if self._kind_by_order is not None:
            return self._kind_by_order[np.sign(q_owner - kv_owner) + 1]
        return self._kind_of_pairs[q_owner, kv_owner]

    def gathered(self, q_owner: Ints) -> Ints:
        """The kind of each rank's queries against all keys, whose columns are tokens."""
        found = (gathered_pieces(self.layout, self.mask, owner) for owner in q_owner.tolist())
        return np.array([self._kinds.of(pieces) for pieces in found], dtype=np.int64)

    def change(self, kinds: Ints, rule: Callable[[Pieces], Pieces]) -> Ints:
        """The kinds of what `rule` makes of the pieces of each kind."""
        return self.measure(kinds, lambda pieces: self._kinds.of(rule(pieces)), np.int64)

    def of_kind(self, kind: int) -> Pieces:
        return self._kinds.values[kind]

    def of_rows(self, number: int) -> Rows:
        return self._rows.values[number]

    def measure(
        self,
        kinds: Ints,
        of: Callable[[Pieces], float],
        dtype: type[np.generic] = np.float64,
    ) -> NDArray[Any]:
        """A number for each entry; `of` is called once for each kind among them."""
        return _measure(kinds, self._kinds.values, of, dtype)

    def q_rows(self, kinds: Ints) -> Ints:
        """The number of the set of rows that each kind uses."""
        return self._side(kinds, of_keys=False)

    def kv_rows(self, kinds: Ints) -> Ints:
        """The number of the set of columns that each kind uses."""
        return self._side(kinds, of_keys=True)

    def whole(self, owners: Ints) -> Ints:
        """The number of the set of all rows of each owner."""
        numbers = {size: self._rows.of(Rows.first(size)) for size in set(self.sizes.tolist())}
        return np.array([numbers[size] for size in self.sizes[owners].tolist()], dtype=np.int64)

    def num_rows(self, rows: Ints) -> Ints:
        """The number of rows in each set."""
        return _measure(rows, self._rows.values, lambda found: found.size, np.int64)

    def _side(self, kinds: Ints, *, of_keys: bool) -> Ints:
        found = np.zeros(len(self._kinds.values), dtype=np.int64)
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            key = (kind, of_keys)
            if key not in self._sides:
                pieces = self.of_kind(kind)
                used = Rows.of(piece.kv if of_keys else piece.q for piece in pieces)
                self._sides[key] = self._rows.of(used)
            found[kind] = self._sides[key]
        return found[kinds]

    @cached_property
    def _kind_of_pairs(self) -> Ints:
        """The kind of each pair, at `[q_owner, kv_owner]`."""
        table = np.full((self.layout.num_ranks,) * 2, NOTHING)
        for pair, pieces in pair_pieces(self.layout, self.mask).items():
            table[pair] = self._kinds.of(pieces)
        return table

    @cached_property
    def _kind_by_order(self) -> Ints | None:
        """The kinds of queries before, at and after the keys, where this order alone decides."""
        if not self.mask.is_causal or not _is_uniform(self.layout):
            return None
        pairs = ((0, 1), (0, 0), (1, 0))
        found = [slot_pieces(self.layout, self.mask, *pair) for pair in pairs]
        return np.array([self._kinds.of(pieces) for pieces in found])


@lru_cache(maxsize=16)
def piece_table(layout: Layout, mask: Mask) -> PieceTable:
    """The table that both directions and all plans of a layout and mask share."""
    return PieceTable(layout, mask)


class _Numbers(Generic[T]):
    """Numbers different values in the order in which they are met; threads may share it."""

    def __init__(self, first: T) -> None:
        self.values = [first]
        self._number_of = {first: 0}
        self._lock = Lock()

    def of(self, value: T) -> int:
        with self._lock:
            number = self._number_of.setdefault(value, len(self.values))
            if number == len(self.values):
                self.values.append(value)
        return number


def _measure(
    numbers: Ints, values: list[T], of: Callable[[T], float], dtype: type[np.generic]
) -> NDArray[Any]:
    found = np.zeros(len(values), dtype)
    for number in np.flatnonzero(np.bincount(numbers)).tolist():
        found[number] = of(values[number])
    return found[numbers]


def _is_uniform(layout: Layout) -> bool:
    """Says whether all ranks have runs of the same sizes, placed in the same way.

    Which of two ranks comes first then says everything about their pair: each run's starts rise or
    fall with the rank, and all ranks' first runs come before all second ones.
    """
    shapes = {tuple((i.size, i.step) for i in rank) for rank in layout.intervals}
    if len(shapes) > 1 or layout.num_ranks < 2 or not layout.num_tokens:
        return False
    starts = np.array([[i.start for i in rank] for rank in layout.intervals])
    moves = np.sign(np.diff(starts, axis=0))
    apart = starts.max(axis=0)[:-1] < starts.min(axis=0)[1:]
    return bool((moves == moves[0]).all() and moves.all() and apart.all())


def query_contributions(pieces: Iterable[Piece]) -> int:
    """The most pieces that add to the gradient of one query: 1 where no two share a row."""
    return _contributions([piece.q for piece in pieces])


def key_contributions(pieces: Iterable[Piece]) -> int:
    """The most pieces that add to the gradients of one key: 1 where no two share a column."""
    return _contributions([piece.kv for piece in pieces])


def _contributions(used: list[Interval]) -> int:
    apart = all(a.stop <= b.start for a, b in pairwise(sorted(used)))
    return min(1, len(used)) if apart else len(used)


def slot_pieces(layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> Pieces:
    """Pieces of one rank's queries against another's keys, in slots, joined where possible."""
    return join_pieces(
        simple
        for q_tokens, q_slots in slots_of(layout.intervals[q_owner])
        for kv_tokens, kv_slots in slots_of(layout.intervals[kv_owner])
        for piece in mask.pieces(q_tokens, kv_tokens)
        for simple in simple_parts(piece.moved(q_slots.start, kv_slots.start))
    )


def pair_pieces(layout: Layout, mask: Mask) -> dict[tuple[int, int], Pieces]:
    """`slot_pieces` of all pairs that have pieces; each region of the mask is looked at once."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for region in mask.regions:
        if (home := layout.run_with(region.q, region.kv)) is not None:
            rank, shift = home  # most documents of a long row are all on one rank
            found.setdefault((rank, rank), []).extend(simple_parts(region.moved(shift, shift)))
            continue
        for q_rank, q_slots, q_tokens in layout.places(region.q):
            seen = region.cut(Interval(q_tokens.start, q_tokens.stop), region.kv)
            for kv_rank, kv_slots, kv_tokens in layout.places(seen.kv) if seen else ():
                part = region.at(q_tokens, kv_tokens)
                if part is not None:
                    pieces = simple_parts(part.moved(q_slots.start, kv_slots.start))
                    found.setdefault((q_rank, kv_rank), []).extend(pieces)
    return {pair: join_pieces(pieces) for pair, pieces in found.items()}


def gathered_pieces(layout: Layout, mask: Mask, q_owner: int) -> Pieces:
    """Pieces of one rank's queries (slots) against all keys (tokens), joined across runs of rows.

    Rows of several runs that see the same keys are one call. So only one call computes with each
    key of another rank, and the key's gradient is rounded once.
    """
    everything = Interval(0, layout.num_tokens)
    pieces = [
        simple
        for tokens, slots in slots_of(layout.intervals[q_owner])
        for piece in mask.pieces(tokens, everything)
        for part in _tables_by_owner(piece.moved(slots.start, 0), layout)
        for simple in simple_parts(part)
    ]
    return join_pieces(pieces, cut_columns=True)


def by_owner(work: Work, layout: Layout) -> list[Work]:
    """Split a work over gathered keys into one for each owner of keys, with columns in slots."""
    if work.kv_owner != EVERYONE:
        return [work]
    parts: dict[int, list[Piece]] = {}
    for piece in work.pieces:
        for owner, slots, tokens in layout.places(piece.kv):
            part = piece.at(piece.q, tokens)
            if part is not None:
                placed = part.moved(piece.q.start, slots.start)
                parts.setdefault(owner, []).extend(simple_parts(placed))
    return [
        work._replace(kv_owner=owner, pieces=join_pieces(pieces))
        for owner, pieces in sorted(parts.items())
    ]


def _tables_by_owner(piece: Piece, layout: Layout) -> list[Piece]:
    """A table cut by the owners of its columns; parts lose their empty rows and columns."""
    if not isinstance(piece.rule, Tile):
        return [piece]
    parts = (piece.cut(piece.q, tokens) for _, _, tokens in layout.places(piece.kv))
    return [part for part in parts if part is not None]
