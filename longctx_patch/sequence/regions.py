"""Regions of the attention matrix: rectangles of (query, key) pairs with a rule.

A rule is a band along the diagonal, or a table with a bit for each pair. Bands are closed under
cutting, so whatever part of a region a rank computes is a region again: a document cut by the edge
of a rank, or a window whose other end is on another rank.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.layout import Interval


class Band(NamedTuple):
    """Row `i` of a rectangle sees its column `j` if `low <= j - i <= high`; None: no bound."""

    low: int | None
    high: int | None

    def shift(self, offset: int) -> "Band":
        """The band of the same pairs where `j - i` has become larger by `offset`."""
        low, high = self
        return Band(None if low is None else low + offset, None if high is None else high + offset)

    def __and__(self, other: "Band") -> "Band":
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Band(max(lows, default=None), min(highs, default=None))


FULL = Band(None, None)
CAUSAL = Band(None, 0)
ANTICAUSAL = Band(0, None)
_NO_BOUND = 2**62


class Tile:
    """A bit for each pair of a rectangle; equal tiles are interchangeable."""

    def __init__(self, bits: NDArray[np.bool_]) -> None:
        self.bits = np.ascontiguousarray(bits, dtype=np.bool_)
        self.bits.setflags(write=False)
        self._key = (self.bits.shape, self.bits.tobytes())
        self._hash = hash(self._key)

    @property
    def area(self) -> int:
        return int(np.count_nonzero(self.bits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        rows, columns = self.bits.shape
        return f"Tile({rows} x {columns}, {self.area} set)"


Rule = Band | Tile


class Piece(NamedTuple):
    """A rectangle of the attention matrix, and which of its pairs are allowed."""

    q: Interval
    kv: Interval
    rule: Rule = FULL

    @property
    def area(self) -> int:
        """Number of allowed (query, key) pairs."""
        if isinstance(self.rule, Tile):
            return self.rule.area
        rows, columns = self.q.stop - self.q.start, self.kv.stop - self.kv.start
        low, high = self.rule
        seen = rows * columns if high is None else _pairs_up_to(high, rows, columns)
        return seen if low is None else seen - _pairs_up_to(low - 1, rows, columns)

    def at(self, q: Interval, kv: Interval) -> "Piece | None":
        """The part in some rows and columns; in the result these count from 0.

        `q` and `kv` lie in those of the piece and have the same step (above 1 in a striped
        placement). Rows and columns without an allowed pair are dropped; None if none is left.
        """
        row, column = q.start - self.q.start, kv.start - self.kv.start
        step = q.step if q.size > 1 else kv.step
        if isinstance(self.rule, Tile):
            rows = slice(row, row + q.stop - q.start, q.step)
            columns = slice(column, column + kv.stop - kv.start, kv.step)
            return trim_tile(self.rule.bits[rows, columns])
        if q.size > 1 and kv.size > 1 and q.step != kv.step:
            raise ValueError(
                f"queries step by {q.step}, keys by {kv.step}: use the same layout for both."
            )
        band = self.rule.shift(row - column)
        if step > 1:
            low, high = band
            band = Band(
                None if low is None else -(-low // step), None if high is None else high // step
            )
        return trim_band(q.size, kv.size, band)

    def moved(self, row: int, column: int) -> "Piece":
        """This piece, moved further down and to the right."""
        return Piece(self.q.shift(row), self.kv.shift(column), self.rule)

    def cut(self, q: Interval, kv: Interval) -> "Piece | None":
        """The part in some of its own rows and columns, at the same place; None if it is empty."""
        q, kv = self.q.intersect(q), self.kv.intersect(kv)
        part = self.at(q, kv) if q.size and kv.size else None
        return part and part.moved(q.start, kv.start)

    def bits(self) -> NDArray[np.bool_]:
        """The whole rectangle as a table; for small rectangles."""
        if isinstance(self.rule, Tile):
            return self.rule.bits
        return band_bits(self.q.size, self.kv.size, self.rule)


def band_bits(rows: int, columns: int, band: Band) -> NDArray[np.bool_]:
    """A band as a table."""
    ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    allowed = np.ones((rows, columns), dtype=np.bool_)
    if band.low is not None:
        allowed &= ahead >= band.low
    if band.high is not None:
        allowed &= ahead <= band.high
    return allowed


def _pairs_up_to(high: int, rows: int, columns: int) -> int:
    """Pairs with `j - i <= high`: row `i` sees `i + high + 1` columns, if there are so many."""

    def rows_before(row: int) -> int:
        """Pairs of the rows before `row`, counted from the row that sees one column."""
        seen = max(0, min(row, columns))
        return seen * (seen + 1) // 2 + max(0, row - columns) * columns

    return rows_before(rows + high) - rows_before(high)


def trim_band(rows: int, columns: int, band: Band) -> Piece | None:
    """The rows and columns that have an allowed pair; bounds that bind nothing become None."""
    low, high = band
    first = 0 if high is None else max(0, -high)
    last = rows if low is None else min(rows, columns - low)
    left = 0 if low is None else max(0, low + first)
    right = columns if high is None else min(columns, last + high)
    if last <= first or right <= left or (low is not None and high is not None and low > high):
        return None
    height, width = last - first, right - left
    low, high = band.shift(first - left)
    tight = Band(
        None if low is None or low <= 1 - height else low,
        None if high is None or high >= width - 1 else high,
    )
    return Piece(Interval(first, last), Interval(left, right), tight)


def trim_tile(bits: NDArray[np.bool_]) -> Piece | None:
    rows, columns = np.flatnonzero(bits.any(axis=1)), np.flatnonzero(bits.any(axis=0))
    if not len(rows):
        return None
    q, kv = (
        Interval(int(rows[0]), int(rows[-1]) + 1),
        Interval(int(columns[0]), int(columns[-1]) + 1),
    )
    inner = bits[slice(*q), slice(*kv)]
    return Piece(q, kv, FULL if inner.all() else Tile(inner))


def intersect(a: Piece, b: Piece) -> Piece | None:
    """The pairs that two pieces of step 1 both allow."""
    q, kv = a.q.intersect(b.q), a.kv.intersect(b.kv)
    if not (q.size and kv.size):
        return None
    if isinstance(a.rule, Tile) or isinstance(b.rule, Tile):
        mine, theirs = a.cut(q, kv), b.cut(q, kv)
        if mine is None or theirs is None:
            return None
        both = _table(mine, q, kv) & _table(theirs, q, kv)
        part = trim_tile(both)
    else:
        # Both bands, counted from the corner of the common rectangle.
        bands = [p.rule.shift((q.start - p.q.start) - (kv.start - p.kv.start)) for p in (a, b)]  # type: ignore[union-attr]
        part = trim_band(q.size, kv.size, bands[0] & bands[1])
    return part and part.moved(q.start, kv.start)


def _table(piece: Piece, q: Interval, kv: Interval) -> NDArray[np.bool_]:
    """The bits of a piece inside a larger rectangle."""
    table = np.zeros((q.size, kv.size), dtype=np.bool_)
    row, column = piece.q.start - q.start, piece.kv.start - kv.start
    table[row : row + piece.q.size, column : column + piece.kv.size] = piece.bits()
    return table


def last_ahead(piece: Piece) -> int:
    """The largest distance of a key after its query."""
    offset = piece.kv.start - piece.q.start
    if isinstance(piece.rule, Tile):
        rows, columns = np.nonzero(piece.rule.bits)
        return int((columns - rows).max()) + offset
    high = piece.kv.size - 1 if piece.rule.high is None else piece.rule.high
    return offset + high


def numbers_of(piece: Piece) -> tuple[int, ...]:
    """A piece as integers, without the bits of a table."""
    rule = (-1, -1) if isinstance(piece.rule, Tile) else piece.rule
    low, high = (_NO_BOUND if bound is None else bound for bound in rule)
    return (*piece.q, *piece.kv, low, high)
