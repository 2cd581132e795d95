"""Masks as predicates over intervals of tokens.

For a (query interval, key interval) pair a mask answers with a short list of rectangles and
squares that any flash kernel computes: nothing, everything, or a causal square. Rows and columns
are counted from the first token of each interval; `plans.pieces` maps them to slots.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from longctx_patch.layout import Interval


class Piece(NamedTuple):
    """A part of the attention matrix that one kernel call computes."""

    q: Interval
    kv: Interval
    causal: bool
    """True: a square whose row `i` sees the columns `0..i`. False: every row sees every column."""

    @property
    def area(self) -> int:
        """Number of (query, key) pairs."""
        return self.q.size * (self.q.size + 1) // 2 if self.causal else self.q.size * self.kv.size


class Mask(Protocol):
    """What plans need to know of a mask."""

    def pieces(self, q: Interval, kv: Interval) -> tuple[Piece, ...]:
        """Disjoint pieces that cover exactly the allowed pairs of the two intervals."""
        ...

    def area(self, q: Interval, kv: Interval) -> int:
        """Number of allowed pairs, in closed form."""
        ...


@dataclass(frozen=True)
class CausalMask:
    """One document: a token sees itself and everything before it."""

    def pieces(self, q: Interval, kv: Interval) -> tuple[Piece, ...]:
        # Row i sees column j if j <= i + ahead: a rectangle, a square, and what is below it.
        ahead = _ahead(q, kv)
        rows, columns = Interval(0, q.size), Interval(0, kv.size)
        past = columns.intersect(Interval(0, max(ahead, 0)))
        row, column = max(0, -ahead), max(0, ahead)
        side = max(0, min(q.size - row, kv.size - column))
        square = Interval(column, column + side)
        candidates = (
            Piece(rows, past, causal=False),
            Piece(Interval(row, row + side), square, causal=True),
            Piece(Interval(row + side, max(row + side, q.size)), square, causal=False),
        )
        return tuple(piece for piece in candidates if piece.area > 0)

    def area(self, q: Interval, kv: Interval) -> int:
        def pairs_before(row: int) -> int:
            """Pairs of the rows before `row`, counted from the row that sees one column."""
            seen = max(0, min(row, kv.size))
            return seen * (seen + 1) // 2 + max(0, row - kv.size) * kv.size

        ahead = _ahead(q, kv)
        return pairs_before(q.size + ahead) - pairs_before(ahead)


def _ahead(q: Interval, kv: Interval) -> int:
    """The last column that row 0 sees (negative: it sees none)."""
    if q.step != kv.step:
        raise ValueError(f"queries step by {q.step} tokens, keys by {kv.step}: use one layout.")
    return (q.start - kv.start) // q.step
