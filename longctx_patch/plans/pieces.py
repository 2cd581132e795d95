"""From a mask over global tokens to the fewest kernel calls over slots."""

from longctx_patch.layout import Layout, slots_of
from longctx_patch.masks import Mask, Piece


class PieceTable:
    """`slot_pieces` of one layout and mask, each pair of owners worked out once."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self._layout = layout
        self._mask = mask
        self._known: dict[tuple[int, int], tuple[Piece, ...]] = {}

    def __call__(self, q_owner: int, kv_owner: int) -> tuple[Piece, ...]:
        key = (q_owner, kv_owner)
        if key not in self._known:
            self._known[key] = slot_pieces(self._layout, self._mask, q_owner, kv_owner)
        return self._known[key]


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
    return tuple(_join_all(pieces))


def _join_all(pieces: list[Piece]) -> list[Piece]:
    """Join until nothing changes; a handful of pieces, so the plain search is enough."""
    while True:
        joined = _join_rectangles(pieces) or _join_triangles(pieces)
        if joined is None:
            return pieces
        pieces = joined


def _join_rectangles(pieces: list[Piece]) -> list[Piece] | None:
    """Two full rectangles that share an edge become one."""
    for a in pieces:
        for b in pieces:
            if a.causal or b.causal:
                continue
            if a.q == b.q and a.kv.stop == b.kv.start:
                new = Piece(a.q, a.kv._replace(stop=b.kv.stop), causal=False)
            elif a.kv == b.kv and a.q.stop == b.q.start:
                new = Piece(a.q._replace(stop=b.q.stop), a.kv, causal=False)
            else:
                continue
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
