"""Schedules in which every block goes straight from its owner to whoever computes with it.

Inputs travel one step before they are used and results one step after, so each transfer can hide
behind one step of computation. A generator only says who computes what in which step.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from longctx_patch.plans.pieces import (
    NOTHING,
    Ints,
    PieceTable,
    key_contributions,
    query_contributions,
)
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.types import Direction, Operand


def direct(schedule: Schedule, steps: Iterator[Sequence[Works]]) -> Iterator[Stage]:
    """The stages that compute the works of `steps`. Those of the first step use local inputs only.

    Steps in which the mask leaves nothing to compute are dropped.
    """
    pieces, direction = schedule.pieces, schedule.direction
    found = (tuple(lane.where(lane.kind != NOTHING) for lane in works) for works in steps)
    before: tuple[Works, ...] = ()
    now = next(found)
    busy = filter(_has_works, found)
    after = next(busy, ())
    assert not inputs(pieces, now, direction, 0), "nothing can arrive before the first step"
    for step in count():
        moves = (*inputs(pieces, after, direction, step), *results(pieces, before, direction))
        if moves or _has_works(now):
            yield Stage(moves, now)
        before, now, after = now, after, next(busy, ())
        if not (before or now):
            return


def _has_works(works: Sequence[Works]) -> bool:
    return any(len(lane.rank) for lane in works)


def inputs(
    pieces: PieceTable, works: Sequence[Works], direction: Direction, step: int
) -> tuple[Moves, ...]:
    """Messages, sent in `step`, with what the computing ranks do not have by themselves."""
    queries = Operand.Q if direction is Direction.FORWARD else Operand.Q_BACKWARD
    arriving = {Operand.KV: 0 * pieces.sizes, queries: 0 * pieces.sizes}
    moves = []
    for lane in works:
        for operand, owner in ((Operand.KV, lane.kv_owner), (queries, lane.q_owner)):
            found = _moves(pieces, lane, operand, owner)
            number = arriving[operand][found.destination]
            arriving[operand][found.destination] += 1
            # Blocks that arrive during one step are read in the next, while others arrive.
            buffers = 4 * number + 2 * (operand is queries) + step % 2
            moves.append(found._replace(buffer=buffers))
    return tuple(lane for lane in moves if len(lane.source))


def results(pieces: PieceTable, works: Sequence[Works], direction: Direction) -> tuple[Moves, ...]:
    """Messages with what belongs to others: single contributions, or sums of several."""
    moves = []
    for lane in works:
        if direction is Direction.FORWARD:
            moves.append(_moves(pieces, lane, Operand.OUT, lane.q_owner))
            continue
        several = pieces.measure(lane.kind, query_contributions) > 1
        one, more = lane.where(~several), lane.where(several)
        moves.append(_moves(pieces, one, Operand.DQ, one.q_owner))
        moves.append(_moves(pieces, more, Operand.DQ_SUM, more.q_owner))
        several = pieces.measure(lane.kind, key_contributions) > 1
        one, more = lane.where(~several), lane.where(several)
        moves.append(_moves(pieces, one, Operand.DKV, one.kv_owner))
        moves.append(_moves(pieces, more, Operand.DKV_SUM, more.kv_owner))
    return tuple(lane for lane in moves if len(lane.source))


def _moves(pieces: PieceTable, works: Works, operand: Operand, owner: Ints) -> Moves:
    """Messages between each work's rank and `owner`, where they differ: inputs go to the rank,
    results come from it."""
    rows = pieces.kv_rows if operand.is_of_keys else pieces.q_rows
    source, destination = (owner, works.rank) if operand.is_input else (works.rank, owner)
    moves = Moves(operand, source, destination, owner, rows(works.kind), None, works.heads)
    return moves.where(source != destination)
