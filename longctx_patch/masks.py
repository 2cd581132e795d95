"""Masks as predicates over intervals of tokens.

For a (query interval, key interval) pair a mask answers with a short list of rectangles and
squares that any flash kernel computes: nothing, everything, or a causal square. Coordinates are
global tokens; `plans.pieces` maps them to slots.
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
        past = Interval(kv.start, max(kv.start, min(q.start, kv.stop)))
        shared = q.intersect(Interval(max(kv.start, q.start), kv.stop))
        later = Interval(max(q.start, shared.stop), q.stop)
        candidates = (
            Piece(q, past, causal=False),
            Piece(shared, shared, causal=True),
            Piece(later, shared, causal=False),
        )
        return tuple(piece for piece in candidates if piece.area > 0)

    def area(self, q: Interval, kv: Interval) -> int:
        def pairs_up_to(stop: int) -> int:
            """Allowed pairs of the rows before `stop`, as if queries started at key 0."""
            seen = max(0, min(stop, kv.stop) - kv.start)
            return seen * (seen + 1) // 2 + max(0, stop - kv.stop) * kv.size

        return pairs_up_to(q.stop) - pairs_up_to(q.start)
