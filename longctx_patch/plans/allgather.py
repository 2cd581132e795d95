"""All-gather context parallelism (Llama 3 report, section 3.3): keys gathered by groups of heads.

While a rank computes one group of heads over the keys of all ranks, the next group is gathered.
There is one softmax over all keys and hardly anything to merge. In backward the gradients of keys
and values go home by groups of heads too: a reduce-scatter, with each contribution rounded once
and the sum in float32.
"""

from collections.abc import Iterator

import numpy as np

from longctx_patch.plans.pieces import NOTHING, Ints, PieceTable
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.types import EVERYONE, Direction, Operand, Share


def allgather(pieces: PieceTable, direction: Direction, *, head_groups: int) -> Schedule:
    """Schedule over contiguous or zigzag shards; balanced over zigzag ones."""
    return Schedule("allgather", direction, pieces, lambda: _stages(pieces, direction, head_groups))


def _stages(pieces: PieceTable, direction: Direction, head_groups: int) -> Iterator[Stage]:
    groups = [Share(part, head_groups) for part in range(head_groups)]
    gather, works, scatter = _gather(pieces), _works(pieces), _scatter(pieces)
    backward = direction is Direction.BACKWARD
    for step in range(head_groups + 1 + backward):
        moves, computed = [], []
        if step < head_groups and len(gather.source):
            moves.append(_into_buffers(gather, step % 2)._replace(heads=groups[step]))
        if step >= 2 and backward and len(scatter.source):
            moves.append(scatter._replace(heads=groups[step - 2]))
        if 1 <= step <= head_groups:
            computed.append(works._replace(heads=groups[step - 1]))
        yield Stage(tuple(moves), tuple(computed))


def _works(pieces: PieceTable) -> Works:
    ranks = np.arange(len(pieces.sizes))
    works = Works(ranks, ranks, np.full_like(ranks, EVERYONE), pieces.gathered(ranks))
    return works.where(works.kind != NOTHING)


def _gather(pieces: PieceTable) -> Moves:
    """Every block to every other rank, ordered so that all ranks send to different ones."""
    source, destination, shift = _all_pairs(len(pieces.sizes))
    stop = pieces.sizes[source]
    moves = Moves(
        Operand.KV, source, destination, source, np.zeros_like(stop), stop, 2 * (shift - 1)
    )
    return moves.where(stop > 0)


def _into_buffers(gather: Moves, parity: int) -> Moves:
    """One group of heads arrives while the one before it is read."""
    assert gather.buffer is not None
    return gather._replace(buffer=gather.buffer + parity)


def _scatter(pieces: PieceTable) -> Moves:
    """To every owner the gradients that another rank's queries gave its keys."""
    rank, owner, _ = _all_pairs(len(pieces.sizes))
    kinds = pieces.kinds(rank, owner)
    moves = Moves(Operand.DKV, rank, owner, owner, *pieces.kv_rows(kinds), None)
    return moves.where(kinds != NOTHING)


def _all_pairs(num_ranks: int) -> tuple[Ints, Ints, Ints]:
    """(rank, other rank, how many ranks further) of all pairs of different ranks."""
    shift = np.repeat(np.arange(1, num_ranks), num_ranks)
    rank = np.tile(np.arange(num_ranks), max(0, num_ranks - 1))
    return rank, (rank + shift) % num_ranks, shift
