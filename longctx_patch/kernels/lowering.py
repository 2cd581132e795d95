"""Cut a piece of a mask into parts that a kernel can compute.

A band of n rows and m columns has up to three zones of rows. In the first and the last zone only
one bound binds: rows see from the first column on, or up to the last column. Between them both
bounds bind, or none:

    high only   xx......      low only above that:  xxxx....    what the bounds do: rows up to
                xxx.....                            .xxx....    `m - high` end before the last
    both        .xxx....                            ..xx....    column, rows from `-low` begin
                ..xxx...                            ...x....    after the first.
    low only    ...xx...

Pieces are tight: the first and last row and column have an allowed pair. The last row has one in
the last column or before, the first column one in the first row or below, so `low <= m - n` and
`low <= 0`; likewise `high >= m - n` and `high >= 0`. So no bound of a window is negative.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW, Traits, Window
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import FULL, Band, Piece, Tile


class Part(NamedTuple):
    """A rectangle and its rule, as a kernel takes it; `flipped` reverses rows and columns."""

    q: Interval
    kv: Interval
    rule: Window | Tile
    flipped: bool = False


def parts_of(piece: Piece, traits: Traits) -> Iterator[Part]:
    """Disjoint parts that make up the piece, each with what these traits allow."""
    rows, columns = piece.q.size, piece.kv.size
    if isinstance(piece.rule, Tile):
        assert traits.tiles, "the choice of a kernel must refuse tables where it takes none"
        yield from _tile_parts(piece)
    elif piece.rule == FULL:
        yield Part(piece.q, piece.kv, FULL_WINDOW)
    elif not _is_tight(rows, columns, piece.rule):
        raise AssertionError(f"{piece}: pieces have no row or column at their edges without a pair")
    elif not traits.windows:
        yield from _triangles(piece, piece.rule)
    elif rows <= columns:
        yield Part(piece.q, piece.kv, window_of(rows, columns, piece.rule))
    else:
        yield from _wide_windows(piece, piece.rule)


def window_of(rows: int, columns: int, band: Band) -> Window:
    """The same rule counted from the last row and column."""
    return Window(
        None if band.low is None else columns - rows - band.low,
        None if band.high is None else band.high - (columns - rows),
    )


def _is_tight(rows: int, columns: int, band: Band) -> bool:
    low, high = band
    is_low = low is None or low <= min(0, columns - rows)
    return is_low and (high is None or high >= max(0, columns - rows))


class _Zones(NamedTuple):
    """Rows up to `first` see from the first column on, rows from `last` up to the last column."""

    first: int
    last: int
    is_between_free: bool
    """True if neither bound binds between the two; otherwise both do."""


def _zones(piece: Piece, band: Band) -> _Zones:
    high_stop = 0 if band.high is None else piece.kv.size - band.high
    low_start = piece.q.size if band.low is None else -band.low
    return _Zones(
        min(high_stop, low_start), max(high_stop, low_start), is_between_free=high_stop < low_start
    )


def _wide_windows(piece: Piece, band: Band) -> Iterator[Part]:
    """A band with more rows than columns, cut into windows with no more rows than columns.

    FlashAttention treats a bound as wide as the number of columns as no bound at all, and a missing
    right bound as one of that width. In a piece with more rows than columns such bounds can bind.
    Cut where a bound begins or ceases to bind, each part is full or has no more rows than columns.
    """
    zones = _zones(piece, band)
    for start, stop in ((0, zones.first), (zones.first, zones.last), (zones.last, piece.q.size)):
        part = piece.cut(Interval(start, stop).shift(piece.q.start), piece.kv)
        if part is not None:
            assert isinstance(part.rule, Band)
            assert part.rule == FULL or part.q.size <= part.kv.size
            yield Part(part.q, part.kv, window_of(part.q.size, part.kv.size, part.rule))


def _triangles(piece: Piece, band: Band) -> Iterator[Part]:
    """A band as full rectangles, causal squares and, flipped, anticausal ones."""
    rows, columns = piece.q.size, piece.kv.size
    zones = _zones(piece, band)
    corner = (piece.q.start, piece.kv.start)
    if zones.first > 0 and band.high is not None:
        yield from _rectangle(corner, 0, zones.first, 0, band.high)
        yield from _square(corner, 0, zones.first, band.high)
    if zones.is_between_free:
        yield from _rectangle(corner, zones.first, zones.last, 0, columns)
    elif band.low is not None and band.high is not None:
        yield from _both_bounds(corner, zones.first, zones.last, band.low, band.high)
    if zones.last < rows and band.low is not None:
        height, start = rows - zones.last, zones.last + band.low
        yield from _square(corner, zones.last, height, start, flipped=True)
        yield from _rectangle(corner, zones.last, rows, start + height, columns)


def _both_bounds(
    corner: tuple[int, int], first: int, last: int, low: int, high: int
) -> Iterator[Part]:
    """Rows that all see `high - low + 1` columns, one further right in each.

    `high - low` of these rows are an anticausal square and, to its right, a causal one; fewer rows
    leave a rectangle between the two.
    """
    if low == high:
        for row in range(first, last):
            yield from _rectangle(corner, row, row + 1, row + low, row + low + 1)
        return
    for row in range(first, last, high - low):
        height = min(high - low, last - row)
        yield from _square(corner, row, height, row + low, flipped=True)
        yield from _rectangle(corner, row, row + height, row + low + height, row + high)
        yield from _square(corner, row, height, row + high)


def _rectangle(
    corner: tuple[int, int], first: int, last: int, left: int, right: int
) -> Iterator[Part]:
    if last > first and right > left:
        q, kv = Interval(first, last).shift(corner[0]), Interval(left, right).shift(corner[1])
        yield Part(q, kv, FULL_WINDOW)


def _square(
    corner: tuple[int, int], first: int, size: int, left: int, *, flipped: bool = False
) -> Iterator[Part]:
    """A causal square, or an anticausal one; one pair is a rectangle."""
    q = Interval(first, first + size).shift(corner[0])
    kv = Interval(left, left + size).shift(corner[1])
    if size > 1:
        yield Part(q, kv, CAUSAL_WINDOW, flipped)
    elif size:
        yield Part(q, kv, FULL_WINDOW)


def _tile_parts(piece: Piece) -> Iterator[Part]:
    """A table, cut at rows that see nothing: their softmax would be empty."""
    sees = np.concatenate([[False], piece.bits().any(axis=1), [False]])
    for start, stop in np.flatnonzero(np.diff(sees)).reshape(-1, 2).tolist():
        part = piece.cut(Interval(start, stop).shift(piece.q.start), piece.kv)
        assert part is not None
        yield Part(part.q, part.kv, part.rule if isinstance(part.rule, Tile) else FULL_WINDOW)
