"""Ring attention: key-value blocks travel around the ranks (Liu et al. 2023, Ring Attention).

In step `s` rank `r` computes with the block of rank `r - s` while the next one arrives. The plan
follows the layout: over contiguous shards it is the plain ring, over zigzag shards the balanced
one, in which every step has half a block of work on every rank.

Backward walks the same ring. The partial sum of dK and dV for an owner starts at the first rank
that adds to it, follows the block around one step behind, and goes home from the last rank. What
the owner adds itself never travels, so there are P - 1 hops rather than the usual P.
"""

from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import Mask
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.types import Block, Direction, Operand, Plan, Step, Transfer, Work


def ring_forward(layout: Layout, mask: Mask, *, name: str = "ring") -> Plan:
    """Forward plan over any layout; `name` is how reports call it."""
    pieces = PieceTable(layout, mask)
    steps = tuple(
        Step(_kv_hops(layout, step), ring_works(layout.num_ranks, pieces, step))
        for step in range(layout.num_ranks)
    )
    return Plan(name, Direction.FORWARD, layout, mask, steps)


def ring_backward(layout: Layout, mask: Mask, *, name: str = "ring") -> Plan:
    """Backward plan over any layout: the key-value ring and, one step behind, the gradient ring."""
    num_ranks = layout.num_ranks
    pieces = PieceTable(layout, mask)
    begun = [_first_visit(num_ranks, pieces, owner) for owner in range(num_ranks)]
    steps = [
        Step(
            _kv_hops(layout, step) + _dkv_hops(layout, begun, step),
            ring_works(num_ranks, pieces, step) if step < num_ranks else (),
        )
        for step in range(num_ranks + 1)
    ]
    if not steps[-1].transfers:
        steps.pop()
    return Plan(name, Direction.BACKWARD, layout, mask, tuple(steps))


def ring_works(num_ranks: int, pieces: PieceTable, step: int) -> tuple[Work, ...]:
    """What the ranks compute in a step: each with the keys of the rank `step` before it."""
    owners = [(rank, (rank - step) % num_ranks) for rank in range(num_ranks)]
    works = (Work(rank, rank, owner, pieces(rank, owner)) for rank, owner in owners)
    return tuple(work for work in works if work.pieces)


def _kv_hops(layout: Layout, step: int) -> tuple[Transfer, ...]:
    """In steps 0 to P - 2, pass the block at hand to the next rank, into the other buffer."""
    num_ranks = layout.num_ranks
    if step >= num_ranks - 1:
        return ()
    return tuple(
        Transfer(rank, (rank + 1) % num_ranks, block, buffer=step % 2)
        for rank in range(num_ranks)
        if (block := _block(layout, Operand.KV, (rank - step) % num_ranks)).rows.size
    )


def _dkv_hops(layout: Layout, begun: list[int], step: int) -> tuple[Transfer, ...]:
    """In steps 2 to P, pass on the sum that was finished in the step before, if it has begun."""
    num_ranks = layout.num_ranks
    if step < 2:
        return ()
    hops = []
    for rank in range(num_ranks):
        owner = (rank - step + 1) % num_ranks
        if begun[owner] < step:
            block = _block(layout, Operand.DKV_SUM, owner)
            hops.append(Transfer(rank, (rank + 1) % num_ranks, block, buffer=None))
    return tuple(hops)


def _first_visit(num_ranks: int, pieces: PieceTable, owner: int) -> int:
    """The first step, after its own, in which a rank adds to an owner's dK and dV."""
    steps = range(1, num_ranks)
    return next((s for s in steps if pieces((owner + s) % num_ranks, owner)), num_ranks)


def _block(layout: Layout, operand: Operand, owner: int) -> Block:
    return Block(operand, owner, Interval(0, layout.sizes[owner]))
