"""BurstAttention's backward: keys and values stay at home, queries travel (Sun et al. 2024).

The bundle (q, dout, lse, delta) walks the ring; every rank computes its own dK and dV at once, and
sends each dQ straight to the owner, where they are summed in float32. The paper lets one running
dQ follow the bundle instead: the same bytes, but rounded at every hop.

It pays where query and key-value heads are equally many; with g query heads per key-value head the
traffic grows with 3 g.
"""

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.pieces import slot_pieces
from longctx_patch.plans.types import Block, Direction, Operand, Plan, Step, Transfer, Work


def burst_backward(layout: Layout, mask: Mask) -> Plan:
    """Backward plan over any layout; balanced over zigzag shards."""
    num_ranks = layout.num_ranks
    works = [
        tuple(work for rank in range(num_ranks) if (work := _work(layout, mask, step, rank)).pieces)
        for step in range(num_ranks)
    ]
    steps = [
        Step(
            _hops(layout, step) + (_returns(works[step - 1]) if step > 1 else ()),
            works[step] if step < num_ranks else (),
        )
        for step in range(num_ranks + 1)
    ]
    if not steps[-1].transfers:
        steps.pop()
    return Plan("burst", Direction.BACKWARD, layout, mask, tuple(steps))


def _work(layout: Layout, mask: Mask, step: int, rank: int) -> Work:
    q_owner = (rank - step) % layout.num_ranks
    return Work(rank, q_owner, rank, slot_pieces(layout, mask, q_owner, rank))


def _hops(layout: Layout, step: int) -> tuple[Transfer, ...]:
    num_ranks = layout.num_ranks
    if step >= num_ranks - 1:
        return ()
    hops = []
    for rank in range(num_ranks):
        owner = (rank - step) % num_ranks
        block = Block(Operand.Q_BACKWARD, owner, Interval(0, layout.sizes[owner]))
        if block.rows.size:
            hops.append(Transfer(rank, (rank + 1) % num_ranks, block, buffer=step % 2))
    return tuple(hops)


def _returns(works: tuple[Work, ...]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            work.rank,
            work.q_owner,
            Block(
                Operand.DQ_SUM if len(work.pieces) > 1 else Operand.DQ, work.q_owner, work.q_rows
            ),
            buffer=None,
        )
        for work in works
    )
