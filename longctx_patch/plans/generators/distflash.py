"""DISTFLASHATTN: owners and helpers over contiguous shards (Li et al. 2024, section 3.1).

In step `t` rank `p >= t` attends to the keys of rank `p - t`. Under a causal mask rank `p < t` has
no work of its own left, so it helps rank `p - t + P`: it computes that rank's queries against its
own keys and sends the result home. There are floor(P / 2) + 1 steps.

For odd P nobody idles. For even P the last step is short of work: its pairs are at distance P / 2
from both sides. As published the helpers idle there, 1 / (P + 1) of all time. `balanced` cuts the
rows of those queries in two halves, one for the owner and one for the helper, and nobody idles.

Where a mask lets queries see later keys, ranks `p < t` have work of their own too, as in a ring.
"""

from collections.abc import Callable, Iterator

import numpy as np

from longctx_patch.plans.generators.direct import direct
from longctx_patch.plans.joining import join_pieces, simple_parts
from longctx_patch.plans.pieces import Ints, Pieces, PieceTable
from longctx_patch.plans.schedule import Schedule, Stage, Works
from longctx_patch.sequence.layout import Interval


def distflash(schedule: Schedule, *, balanced: bool) -> Iterator[Stage]:
    """Stages as published, or `balanced` for even numbers of ranks."""
    num_ranks, sees_ahead = schedule.num_ranks, schedule.pieces.mask.sees_ahead
    num_steps = num_ranks if sees_ahead else num_ranks // 2 + 1
    steps = (_step(schedule.pieces, step, balanced) for step in range(num_steps))
    return direct(schedule, steps)


def _step(pieces: PieceTable, step: int, balanced: bool) -> list[Works]:
    """The works of owners, and those of helpers for others and, over later keys, for themselves."""
    ranks = np.arange(len(pieces.sizes))
    owners, helpers = ranks[ranks >= step], ranks[ranks < step]
    across = helpers - step + len(ranks)  # the ranks at the same distance, around the end
    lanes = []
    if 2 * step <= len(ranks):
        lanes = [
            _works(pieces, owners, owners, owners - step),
            _works(pieces, helpers, across, helpers),
        ]
        if 2 * step == len(ranks):
            lanes = _halves(pieces, *lanes) if balanced else lanes[:1]
    if pieces.mask.sees_ahead and step:
        # Helpers' own queries against later keys, of which causal masks allow none.
        lanes.append(_works(pieces, helpers, helpers, across))
    return lanes


def _halves(pieces: PieceTable, own: Works, helped: Works) -> list[Works]:
    """Share the pairs at distance P / 2: owner and helper each compute one half of the rows."""
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
    """The part of the pieces in one half of the rows, from the first row used to the last."""
    if not pieces:
        return ()
    start, stop = min(p.q.start for p in pieces), max(p.q.stop for p in pieces)
    rows = half(start, (start + stop) // 2, stop)
    cut = [part for piece in pieces if (part := piece.cut(rows, piece.kv))]
    return join_pieces(simple for part in cut for simple in simple_parts(part))
