"""Ring attention: key-value blocks travel around the ranks (Liu et al. 2023, Ring Attention).

Steps count from 0: in step `s` rank `r` computes with the keys of rank `(r - s) mod P` while the
next block arrives. The plan follows the layout: over contiguous shards it is the plain ring, over
zigzag shards the balanced one, in which every step has half a block of work on every rank.

Backward walks the same ring. The partial sum of dK and dV for an owner starts at the first rank
that adds to it, follows the block around one step behind, and goes home from the last rank. What
the owner adds itself never travels, so there are P - 1 hops rather than the usual P.
"""

from collections.abc import Iterator

import numpy as np

from longctx_patch.plans.pieces import NOTHING, PieceTable
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works, whole_blocks
from longctx_patch.plans.types import Direction, Operand


def ring(schedule: Schedule) -> Iterator[Stage]:
    """Stages over any layout."""
    forward = schedule.direction is Direction.FORWARD
    return (_forward_stages if forward else _backward_stages)(schedule.pieces)


def ring_works(pieces: PieceTable, step: int) -> Works:
    """The works of a step: each rank computes with the keys of the rank `step` before it."""
    ranks = np.arange(len(pieces.sizes))
    owners = (ranks - step) % len(ranks)
    works = Works(ranks, ranks, owners, pieces.kinds(ranks, owners))
    return works.where(works.kind != NOTHING)


def _forward_stages(pieces: PieceTable) -> Iterator[Stage]:
    for step in range(len(pieces.sizes)):
        yield Stage(_kv_hops(pieces, step), (ring_works(pieces, step),))


def _backward_stages(pieces: PieceTable) -> Iterator[Stage]:
    num_ranks = len(pieces.sizes)
    ranks = np.arange(num_ranks)
    begun = np.zeros(num_ranks, dtype=bool)  # by owner: whether another rank has added to its sum
    for step in range(num_ranks + 1):
        # Pass on what was finished in the step before.
        finished = (ranks - step + 1) % num_ranks
        following = (ranks + 1) % num_ranks
        sums = whole_blocks(pieces, Operand.DKV_SUM, ranks, following, finished, buffer=None)
        sums = sums.where(begun[sums.owner])
        if step == num_ranks:
            if len(sums.source):
                yield Stage((sums,), ())
            return
        works = ring_works(pieces, step)
        yield Stage((*_kv_hops(pieces, step), sums), (works,))
        if step > 0:
            begun[works.kv_owner] = True


def _kv_hops(pieces: PieceTable, step: int) -> tuple[Moves, ...]:
    """Sends the block at hand to the next rank, into its other buffer, unless this step is last."""
    num_ranks = len(pieces.sizes)
    if step >= num_ranks - 1:
        return ()
    ranks = np.arange(num_ranks)
    owners, following = (ranks - step) % num_ranks, (ranks + 1) % num_ranks
    return (whole_blocks(pieces, Operand.KV, ranks, following, owners, buffer=step % 2),)
