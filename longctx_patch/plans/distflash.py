"""DISTFLASHATTN: owners and helpers over contiguous shards (Li et al. 2024, section 3.1).

In step `t` rank `p >= t` attends to the keys of rank `p - t`. Under a causal mask the ranks before
have nothing left of their own; rank `p < t` helps the rank at distance `P - t`, computes its
queries against the helper's own keys, and sends the result home. There are floor(P / 2) + 1 steps.

Odd P has no idle time. For even P the last step is short of work: its pairs are at distance P / 2
from both sides. As published the helpers idle there, 1 / (P + 1) of all time. `balanced` cuts the
rows of those queries in two halves, one for the owner and one for the helper, and nobody idles.
"""

from collections.abc import Sequence

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Mask, Piece
from longctx_patch.plans.direct import direct_plan
from longctx_patch.plans.pieces import slot_pieces
from longctx_patch.plans.types import Direction, Plan, Work


def distflash(layout: Layout, mask: Mask, direction: Direction, *, balanced: bool) -> Plan:
    """The plan as published, or `balanced` for even numbers of ranks."""
    num_ranks = layout.num_ranks
    works = [
        [work for rank in range(num_ranks) if (work := _work(layout, mask, step, rank, balanced))]
        for step in range(num_ranks // 2 + 1)
    ]
    name = "distflash_balanced" if balanced else "distflash"
    return direct_plan(name, direction, layout, mask, works)


def _work(layout: Layout, mask: Mask, step: int, rank: int, balanced: bool) -> Work | None:
    num_ranks = layout.num_ranks
    antipodal = step > 0 and 2 * step == num_ranks
    if rank >= step:
        q_owner, kv_owner = rank, rank - step
    elif antipodal and not balanced:
        return None
    else:
        q_owner, kv_owner = rank - step + num_ranks, rank
    pieces = slot_pieces(layout, mask, q_owner, kv_owner)
    if antipodal and balanced:
        middle = layout.sizes[q_owner] // 2
        mine = Interval(middle, layout.sizes[q_owner]) if rank >= step else Interval(0, middle)
        pieces = _only_rows(pieces, mine)
    return Work(rank, q_owner, kv_owner, pieces) if pieces else None


def _only_rows(pieces: Sequence[Piece], rows: Interval) -> tuple[Piece, ...]:
    """The parts of full rectangles that lie in `rows`; shards apart have no causal squares."""
    assert not any(piece.causal for piece in pieces)
    cut = (piece._replace(q=piece.q.intersect(rows)) for piece in pieces)
    return tuple(piece for piece in cut if piece.q.size)
