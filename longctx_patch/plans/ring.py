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
from longctx_patch.plans.pieces import slot_pieces
from longctx_patch.plans.types import Block, Direction, Operand, Plan, Step, Transfer, Work


def ring_forward(layout: Layout, mask: Mask, *, name: str = "ring") -> Plan:
    """Forward plan over any layout; `name` is how reports call it."""
    num_ranks = layout.num_ranks
    steps = tuple(
        Step(_kv_hops(layout, step), ring_works(layout, mask, step)) for step in range(num_ranks)
    )
    return Plan(name, Direction.FORWARD, layout, mask, steps)


def ring_backward(layout: Layout, mask: Mask, *, name: str = "ring") -> Plan:
    """Backward plan over any layout: the key-value ring and, one step behind, the gradient ring."""
    num_ranks = layout.num_ranks
    steps = [
        Step(
            _kv_hops(layout, step) + _dkv_hops(layout, mask, step),
            ring_works(layout, mask, step) if step < num_ranks else (),
        )
        for step in range(num_ranks + 1)
    ]
    if not steps[-1].transfers:
        steps.pop()
    return Plan(name, Direction.BACKWARD, layout, mask, tuple(steps))


def ring_works(layout: Layout, mask: Mask, step: int) -> tuple[Work, ...]:
    """What the ranks compute in a step: each with the keys of the rank `step` before it."""
    works = []
    for rank in range(layout.num_ranks):
        kv_owner = (rank - step) % layout.num_ranks
        if pieces := slot_pieces(layout, mask, rank, kv_owner):
            works.append(Work(rank, rank, kv_owner, pieces))
    return tuple(works)


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


def _dkv_hops(layout: Layout, mask: Mask, step: int) -> tuple[Transfer, ...]:
    """In steps 2 to P, pass on the sum that was finished in the step before, if it has begun."""
    num_ranks = layout.num_ranks
    if step < 2:
        return ()
    hops = []
    for rank in range(num_ranks):
        owner = (rank - step + 1) % num_ranks
        visited = [(owner + hop) % num_ranks for hop in range(1, step)]
        if any(slot_pieces(layout, mask, visitor, owner) for visitor in visited):
            block = _block(layout, Operand.DKV_SUM, owner)
            hops.append(Transfer(rank, (rank + 1) % num_ranks, block, buffer=None))
    return tuple(hops)


def _block(layout: Layout, operand: Operand, owner: int) -> Block:
    return Block(operand, owner, Interval(0, layout.sizes[owner]))
