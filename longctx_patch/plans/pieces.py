"""From a mask over global tokens to the fewest kernel calls over slots."""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx_patch.layout import Interval, Layout, slots_of
from longctx_patch.masks import CausalMask, Mask, Piece

Ints = NDArray[np.int64]
NOTHING = 0
"""Kind of the pairs that have no piece."""


class PieceTable:
    """Pieces of the pairs of owners of one layout and mask, numbered by kind.

    A long causal sequence over thousands of ranks has millions of pairs but three kinds: before,
    on, and after the diagonal.
    """

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self.layout = layout
        self.mask = mask
        self.sizes: Ints = np.array(layout.sizes)
        self._kinds: dict[tuple[Piece, ...], int] = {(): NOTHING}
        self._pairs: dict[tuple[int, int], int] = {}
        self._table: list[tuple[Piece, ...]] = [()]

    def kinds(self, q_owner: Ints, kv_owner: Ints) -> Ints:
        """The kind of each (queries of, keys of) pair."""
        if self._kind_by_order is not None:
            return self._kind_by_order[np.sign(q_owner - kv_owner) + 1]
        pairs = zip(q_owner.tolist(), kv_owner.tolist(), strict=True)
        return np.array([self._kind_of_pair(*pair) for pair in pairs], dtype=np.int64)

    def gathered(self, q_owner: Ints) -> Ints:
        """The kind of each rank's queries against the keys of all, with tokens as columns."""
        found = (gathered_pieces(self.layout, self.mask, owner) for owner in q_owner.tolist())
        return np.array([self._number(pieces) for pieces in found], dtype=np.int64)

    def change(self, kinds: Ints, rule: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]) -> Ints:
        """The kinds of the pieces that `rule` makes of those of each kind."""
        return self.measure(kinds, lambda pieces: self._number(rule(pieces)), np.int64)

    def of_kind(self, kind: int) -> tuple[Piece, ...]:
        return self._table[kind]

    def measure(
        self,
        kinds: Ints,
        of: Callable[[tuple[Piece, ...]], float],
        dtype: type[np.generic] = np.float64,
    ) -> NDArray[Any]:
        """A number for each entry; `of` is called once for each kind among them."""
        found = np.zeros(len(self._table), dtype)
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            found[kind] = of(self.of_kind(kind))
        return found[kinds]

    def q_rows(self, kinds: Ints) -> tuple[Ints, Ints]:
        """(start, stop) of the rows that each kind uses."""
        return self._hulls(kinds, lambda piece: piece.q)

    def kv_rows(self, kinds: Ints) -> tuple[Ints, Ints]:
        """(start, stop) of the columns that each kind uses."""
        return self._hulls(kinds, lambda piece: piece.kv)

    def _hulls(self, kinds: Ints, side: Callable[[Piece], Interval]) -> tuple[Ints, Ints]:
        def span(pieces: tuple[Piece, ...]) -> Interval:
            return hull([side(piece) for piece in pieces])

        starts = self.measure(kinds, lambda pieces: span(pieces).start, np.int64)
        return starts, self.measure(kinds, lambda pieces: span(pieces).stop, np.int64)

    def _kind_of_pair(self, q_owner: int, kv_owner: int) -> int:
        pair = (q_owner, kv_owner)
        if pair not in self._pairs:
            self._pairs[pair] = self._number(slot_pieces(self.layout, self.mask, *pair))
        return self._pairs[pair]

    def _number(self, pieces: tuple[Piece, ...]) -> int:
        if pieces not in self._kinds:
            self._kinds[pieces] = len(self._table)
            self._table.append(pieces)
        return self._kinds[pieces]

    @cached_property
    def _kind_by_order(self) -> Ints | None:
        """Kinds of earlier, same and later queries, where only that order counts."""
        if not isinstance(self.mask, CausalMask) or not _alike(self.layout):
            return None
        return np.array([self._kind_of_pair(*pair) for pair in ((0, 1), (0, 0), (1, 0))])


def _alike(layout: Layout) -> bool:
    """Whether all ranks have runs of the same sizes, placed in the same way.

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


def hull(intervals: list[Interval]) -> Interval:
    """From the first to the last row of any."""
    if not intervals:
        return Interval(0, 0)
    return Interval(min(i.start for i in intervals), max(i.stop for i in intervals))


def slot_pieces(layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> tuple[Piece, ...]:
    """Pieces of one rank's queries against another's keys, in slots, joined where possible."""
    pieces = [
        Piece(
            piece.q.shift(q_slots.start),
            piece.kv.shift(kv_slots.start),
            piece.causal,
        )
        for q_tokens, q_slots in slots_of(layout.intervals[q_owner])
        for kv_tokens, kv_slots in slots_of(layout.intervals[kv_owner])
        for piece in mask.pieces(q_tokens, kv_tokens)
    ]
    return join_pieces(pieces)


def gathered_pieces(layout: Layout, mask: Mask, q_owner: int) -> tuple[Piece, ...]:
    """Pieces of one rank's queries (slots) against all keys (tokens), joined across runs of rows.

    Rows of several runs that see the same keys are one call, so each key of another rank is met
    by one call only, and its gradient is rounded once.
    """
    everything = Interval(0, layout.num_tokens)
    pieces = [
        piece._replace(q=piece.q.shift(slots.start))
        for tokens, slots in slots_of(layout.intervals[q_owner])
        for piece in mask.pieces(tokens, everything)
    ]
    edges = {edge for piece in pieces for edge in piece.kv[:2]}
    return join_pieces([part for piece in pieces for part in _cut_columns(piece, edges)])


def _cut_columns(piece: Piece, edges: set[int]) -> list[Piece]:
    """A rectangle cut at the edges inside it."""
    if piece.causal:
        return [piece]
    cuts = sorted({*piece.kv[:2], *(e for e in edges if piece.kv.start < e < piece.kv.stop)})
    return [piece._replace(kv=Interval(a, b)) for a, b in pairwise(cuts)]


def join_pieces(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join until nothing changes; a handful of pieces, so the plain search is enough."""
    while True:
        joined = _join_rows(pieces) or _join_columns(pieces) or _join_triangles(pieces)
        if joined is None:
            return tuple(pieces)
        pieces = joined


def _join_rows(pieces: list[Piece]) -> list[Piece] | None:
    """Two full rectangles, one below the other, become one."""
    for a in pieces:
        for b in pieces:
            if not (a.causal or b.causal) and a.kv == b.kv and a.q.stop == b.q.start:
                new = a._replace(q=a.q._replace(stop=b.q.stop))
                return [new if piece is a else piece for piece in pieces if piece is not b]
    return None


def _join_columns(pieces: list[Piece]) -> list[Piece] | None:
    """Two full rectangles side by side become one."""
    for a in pieces:
        for b in pieces:
            if not (a.causal or b.causal) and a.q == b.q and a.kv.stop == b.kv.start:
                new = a._replace(kv=a.kv._replace(stop=b.kv.stop))
                return [new if piece is a else piece for piece in pieces if piece is not b]
    return None


def _join_triangles(pieces: list[Piece]) -> list[Piece] | None:
    """Two causal squares on one diagonal and the rectangle between them become one square."""
    for a in pieces:
        for b in pieces:
            if not (a.causal and b.causal and a.q.stop == b.q.start and a.kv.stop == b.kv.start):
                continue
            between = Piece(b.q, a.kv, causal=False)
            if between not in pieces:
                continue
            new = Piece(a.q._replace(stop=b.q.stop), a.kv._replace(stop=b.kv.stop), causal=True)
            rest = [piece for piece in pieces if piece not in (a, b, between)]
            return [new, *rest]
    return None
