"""What a work over gathered keys is made of, owner by owner."""

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Piece
from longctx_patch.plans.pieces import join_pieces
from longctx_patch.plans.types import EVERYONE, Work


def by_owner(work: Work, layout: Layout) -> list[Work]:
    """The works, one for each owner of keys, that together compute the same; columns in slots."""
    if work.kv_owner != EVERYONE:
        return [work]
    parts: dict[int, list[Piece]] = {}
    for piece in work.pieces:
        for owner, slots, tokens in layout.places(piece.kv):
            parts.setdefault(owner, []).extend(_columns(piece, tokens, slots))
    return [
        work._replace(kv_owner=owner, pieces=join_pieces(pieces))
        for owner, pieces in sorted(parts.items())
    ]


def _columns(piece: Piece, tokens: Interval, slots: Interval) -> list[Piece]:
    """The part of a piece that lies in some of its columns, which are `slots` of their owner."""
    if not piece.causal:
        return [piece._replace(kv=slots)]
    diagonal = tokens.shift(piece.q.start - piece.kv.start)
    below = Interval(diagonal.stop, piece.q.stop)
    square = Piece(diagonal, slots, causal=True)
    return [square, Piece(below, slots, causal=False)] if below.size else [square]
