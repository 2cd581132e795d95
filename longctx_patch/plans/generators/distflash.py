"""DISTFLASHATTN: owners and helpers over contiguous shards (Li et al. 2024, section 3.1).

In step `t` rank `p >= t` attends to the keys of rank `p - t`. Under a causal mask the ranks before
have nothing left of their own; rank `p < t` helps the rank at distance `P - t`, computes its
queries against the helper's own keys, and sends the result home. There are floor(P / 2) + 1 steps.

Odd P has no idle time. For even P the last step is short of work: its pairs are at distance P / 2
from both sides. As published the helpers idle there, 1 / (P + 1) of all time. `balanced` cuts the
rows of those queries in two halves, one for the owner and one for the helper, and nobody idles.

Where a mask lets queries see later keys, those ranks have work of their own, as in a ring.
"""

from collections.abc import Callable

import numpy as np

from longctx_patch.plans.generators.direct import direct
from longctx_patch.plans.joining import join_pieces, simple_parts
from longctx_patch.plans.pieces import Ints, Pieces, PieceTable
from longctx_patch.plans.schedule import Schedule, Works
from longctx_patch.plans.types import Direction
from longctx_patch.sequence.layout import Interval


def distflash(pieces: PieceTable, direction: Direction, *, balanced: bool) -> Schedule:
    """The schedule as published, or `balanced` for even numbers of ranks."""
    num_ranks = len(pieces.sizes)
    sees_ahead = pieces.mask.sees_ahead

    def works(step: int) -> list[Works]:
        ranks = np.arange(num_ranks)
        owners, helpers = ranks[ranks >= step], ranks[ranks < step]
        lanes = []
        if 2 * step <= num_ranks:
            own = _works(pieces, owners, owners, owners - step)
            helped = _works(pieces, helpers, helpers - step + num_ranks, helpers)
            lanes = (
                _last_step(pieces, own, helped, balanced)
                if 2 * step == num_ranks
                else [own, helped]
            )
        if sees_ahead and step:
            # Keys after the queries: causal masks have none, and then the helpers have time.
            lanes.append(_works(pieces, helpers, helpers, helpers - step + num_ranks))
        return lanes

    name = "distflash_balanced" if balanced else "distflash"
    num_steps = num_ranks if sees_ahead else num_ranks // 2 + 1
    return direct(name, direction, pieces, lambda: map(works, range(num_steps)))


def _last_step(pieces: PieceTable, own: Works, helped: Works, balanced: bool) -> list[Works]:
    """Pairs at half the way around: their owners' alone, or both ends' together."""
    if not balanced or not len(helped.rank):
        return [own]
    return [
        own._replace(kind=pieces.change(own.kind, _back_rows)),
        helped._replace(kind=pieces.change(helped.kind, _front_rows)),
    ]


def _works(pieces: PieceTable, rank: Ints, q_owner: Ints, kv_owner: Ints) -> Works:
    return Works(rank, q_owner, kv_owner, pieces.kinds(q_owner, kv_owner))


def _front_rows(pieces: Pieces) -> Pieces:
    return _only_rows(pieces, lambda start, middle, stop: Interval(start, middle))


def _back_rows(pieces: Pieces) -> Pieces:
    return _only_rows(pieces, lambda start, middle, stop: Interval(middle, stop))


def _only_rows(pieces: Pieces, half: Callable[[int, int, int], Interval]) -> Pieces:
    """What lies in one half of the rows, from the first to the last that are used."""
    if not pieces:
        return ()
    start, stop = min(p.q.start for p in pieces), max(p.q.stop for p in pieces)
    rows = half(start, (start + stop) // 2, stop)
    cut = [part for piece in pieces if (part := piece.cut(rows, piece.kv))]
    return join_pieces(simple for part in cut for simple in simple_parts(part))
