"""What a work over gathered keys is made of, owner by owner."""

from longctx_patch.plans.joining import join_pieces, simple_parts
from longctx_patch.plans.types import EVERYONE, Work
from longctx_patch.sequence.layout import Layout
from longctx_patch.sequence.regions import Piece


def by_owner(work: Work, layout: Layout) -> list[Work]:
    """The works, one for each owner of keys, that together compute the same; columns in slots."""
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
