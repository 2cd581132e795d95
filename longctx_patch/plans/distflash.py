"""DISTFLASHATTN: owners and helpers over contiguous shards (Li et al. 2024, section 3.1).

In step `t` rank `p >= t` attends to the keys of rank `p - t`. Under a causal mask the ranks before
have nothing left of their own; rank `p < t` helps the rank at distance `P - t`, computes its
queries against the helper's own keys, and sends the result home. There are floor(P / 2) + 1 steps.

Odd P has no idle time. For even P the last step is short of work: its pairs are at distance P / 2
from both sides. As published the helpers idle there, 1 / (P + 1) of all time. `balanced` cuts the
rows of those queries in two halves, one for the owner and one for the helper, and nobody idles.
"""

import numpy as np

from longctx_patch.layout import Interval
from longctx_patch.masks import Piece
from longctx_patch.plans.direct import direct
from longctx_patch.plans.pieces import Ints, PieceTable, hull
from longctx_patch.plans.schedule import Schedule, Works
from longctx_patch.plans.types import Direction


def distflash(pieces: PieceTable, direction: Direction, *, balanced: bool) -> Schedule:
    """The schedule as published, or `balanced` for even numbers of ranks."""
    num_ranks = len(pieces.sizes)

    def works(step: int) -> list[Works]:
        ranks = np.arange(num_ranks)
        owners, helpers = ranks[ranks >= step], ranks[ranks < step]
        own = _works(pieces, owners, owners, owners - step)
        helped = _works(pieces, helpers, helpers - step + num_ranks, helpers)
        if step == 0 or 2 * step != num_ranks:
            return [own, helped]
        if not balanced:
            return [own]
        return [
            own._replace(kind=pieces.change(own.kind, _back_rows)),
            helped._replace(kind=pieces.change(helped.kind, _front_rows)),
        ]

    name = "distflash_balanced" if balanced else "distflash"
    return direct(name, direction, pieces, num_ranks // 2 + 1, works)


def _works(pieces: PieceTable, rank: Ints, q_owner: Ints, kv_owner: Ints) -> Works:
    return Works(rank, q_owner, kv_owner, pieces.kinds(q_owner, kv_owner))


def _front_rows(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    rows = hull([piece.q for piece in pieces])
    return _only_rows(pieces, Interval(rows.start, (rows.start + rows.stop) // 2))


def _back_rows(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    rows = hull([piece.q for piece in pieces])
    return _only_rows(pieces, Interval((rows.start + rows.stop) // 2, rows.stop))


def _only_rows(pieces: tuple[Piece, ...], rows: Interval) -> tuple[Piece, ...]:
    """The parts of full rectangles that lie in `rows`; shards apart have no causal squares."""
    assert not any(piece.causal for piece in pieces)
    cut = (piece._replace(q=piece.q.intersect(rows)) for piece in pieces)
    return tuple(piece for piece in cut if piece.q.size)
