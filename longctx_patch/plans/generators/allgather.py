"""All-gather context parallelism (Llama 3 report, section 3.3): keys gathered by groups of heads.

While a rank computes one group of heads over the keys of all ranks, the next group is gathered.
There is one softmax over all keys and hardly anything to merge. In backward the gradients of keys
and values go home by groups of heads too: a reduce-scatter, with each contribution rounded once
and the sum in float32.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from longctx_patch.plans.pieces import NOTHING, Ints, PieceTable, by_owner, key_contributions
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.types import EVERYONE, Direction, Operand, Share, Work

MAX_HEAD_GROUPS = 4
"""More groups of key-value heads hide more of the first gather, but each kernel call has fewer
heads to fill the device with."""


def allgather(schedule: Schedule) -> Iterator[Stage]:
    """Stages over shards of consecutive tokens; balanced over zigzag ones."""
    pieces, head_groups = schedule.pieces, min(schedule.num_kv_heads, MAX_HEAD_GROUPS)
    groups = [Share(part, head_groups) for part in range(head_groups)]
    gather, works, scatter = _gather(pieces), _works(pieces), _scatter(pieces)
    backward = schedule.direction is Direction.BACKWARD
    for step in range(head_groups + 1 + backward):
        moves, computed = [], []
        if step < head_groups and len(gather.source):
            moves.append(_into_buffers(gather, step % 2)._replace(heads=groups[step]))
        if step >= 2 and backward:
            moves += [lane._replace(heads=groups[step - 2]) for lane in scatter]
        if 1 <= step <= head_groups:
            computed.append(works._replace(heads=groups[step - 1]))
        yield Stage(tuple(moves), tuple(computed))


def _works(pieces: PieceTable) -> Works:
    ranks = np.arange(len(pieces.sizes))
    works = Works(ranks, ranks, np.full_like(ranks, EVERYONE), pieces.gathered(ranks))
    return works.where(works.kind != NOTHING)


def _gather(pieces: PieceTable) -> Moves:
    """Messages with every block to every other rank, in order of the distance between the two."""
    source, destination, shift = _all_pairs(len(pieces.sizes))
    whole = pieces.whole(source)
    moves = Moves(Operand.KV, source, destination, source, whole, 2 * (shift - 1))
    return moves.where(pieces.sizes[source] > 0)


def _into_buffers(gather: Moves, parity: int) -> Moves:
    """The buffers of a step: one group of heads arrives while the one before it is read."""
    assert gather.buffer is not None
    return gather._replace(buffer=gather.buffer + parity)


def _scatter(pieces: PieceTable) -> tuple[Moves, ...]:
    """Messages to every owner with the gradients that another rank's queries gave its keys."""
    rank, owner, _ = _all_pairs(len(pieces.sizes))
    kinds = pieces.kinds(rank, owner)
    moves = Moves(Operand.DKV, rank, owner, owner, pieces.kv_rows(kinds), None)
    several = _several(pieces, rank, owner)
    sums = moves._replace(operand=Operand.DKV_SUM).where((kinds != NOTHING) & several)
    lanes = (moves.where((kinds != NOTHING) & ~several), sums)
    return tuple(lane for lane in lanes if len(lane.source))


def _several(pieces: PieceTable, rank: Ints, owner: Ints) -> NDArray[np.bool_]:
    """For each pair, whether several pieces of the gathered keys may add to one key's gradient."""
    several = np.zeros((len(pieces.sizes),) * 2, dtype=np.bool_)
    if not pieces.mask.is_causal:  # if causal, one piece has each key of another rank
        kinds = pieces.gathered(np.arange(len(pieces.sizes)))
        for q_owner, kind in enumerate(kinds.tolist()):
            work = Work(q_owner, q_owner, EVERYONE, pieces.of_kind(kind))
            for part in by_owner(work, pieces.layout):
                several[q_owner, part.kv_owner] = key_contributions(part.pieces) > 1
    return several[rank, owner]


def _all_pairs(num_ranks: int) -> tuple[Ints, Ints, Ints]:
    """(rank, other rank, how many ranks further) of all pairs of different ranks."""
    shift = np.repeat(np.arange(1, num_ranks), num_ranks)
    rank = np.tile(np.arange(num_ranks), max(0, num_ranks - 1))
    return rank, (rank + shift) % num_ranks, shift
