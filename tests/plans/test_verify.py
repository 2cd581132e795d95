"""Break a right plan in each way that would give wrong numbers; the complaint names the rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from longctx_patch.layout import Interval, zigzag
from longctx_patch.masks import CausalMask, Piece
from longctx_patch.plans import (
    Direction,
    PieceTable,
    Plan,
    PlanError,
    Step,
    allgather,
    ring,
    verify_plan,
)

PIECES = PieceTable(zigzag(32, 4), CausalMask())
FORWARD, BACKWARD = (ring(PIECES, direction).plan() for direction in Direction)
GATHERED = allgather(PIECES, Direction.BACKWARD, head_groups=2).plan()


def with_step(plan: Plan, number: int, change: Callable[[Step], Step]) -> Plan:
    steps = list(plan.steps)
    steps[number] = change(steps[number])
    return replace(plan, steps=tuple(steps))


def drop_work(step: Step) -> Step:
    return replace(step, works=step.works[1:])


def repeat_work(step: Step) -> Step:
    return replace(step, works=(*step.works, step.works[0]))


def see_the_future(step: Step) -> Step:
    work = step.works[0]
    piece = work.pieces[0]._replace(causal=False)
    return replace(step, works=(work._replace(pieces=(piece,)), *step.works[1:]))


def shift_rows(step: Step) -> Step:
    work = step.works[0]
    pieces = tuple(Piece(p.q, Interval(0, p.kv.size + 1), p.causal) for p in work.pieces)
    return replace(step, works=(work._replace(pieces=pieces), *step.works[1:]))


def drop_transfer(step: Step) -> Step:
    return replace(step, transfers=step.transfers[1:])


def same_buffer(step: Step) -> Step:
    first = step.transfers[0]
    assert first.buffer is not None
    changed = first._replace(buffer=1 - first.buffer)
    return replace(step, transfers=(changed, *step.transfers[1:]))


def to_itself(step: Step) -> Step:
    first = step.transfers[0]
    return replace(step, transfers=(first._replace(destination=first.source), *step.transfers[1:]))


def no_such_rank(step: Step) -> Step:
    return replace(step, transfers=(step.transfers[0]._replace(destination=9), *step.transfers[1:]))


def no_rows(step: Step) -> Step:
    first = step.transfers[0]
    empty = first._replace(block=first.block._replace(rows=Interval(0, 0)))
    return replace(step, transfers=(empty, *step.transfers[1:]))


def twice_into_one_buffer(step: Step) -> Step:
    return replace(step, transfers=(*step.transfers, step.transfers[0]))


def forget_a_group(step: Step) -> Step:
    return replace(step, works=())


@pytest.mark.parametrize(
    ("plan", "number", "change", "complaint"),
    [
        (FORWARD, 1, drop_work, r"coverage: .* 0 pairs computed of"),
        (FORWARD, 1, repeat_work, r"coverage: .* overlap"),
        (FORWARD, 0, see_the_future, r"coverage: .* not allowed"),
        (FORWARD, 1, shift_rows, r"coverage: .* not allowed"),
        (FORWARD, 0, drop_transfer, r"read: step 1: rank 1 does not hold"),
        (FORWARD, 1, same_buffer, r"buffer: step 1: rank 1 overwrites buffer 0 while reading"),
        (
            FORWARD,
            0,
            twice_into_one_buffer,
            r"buffer: step 0: rank 1 has 2 transfers land in buffer 0",
        ),
        (FORWARD, 0, to_itself, r"transfer: step 0: a rank sends to itself"),
        (FORWARD, 0, no_such_rank, r"transfer: step 0: no such rank"),
        (FORWARD, 0, no_rows, r"transfer: step 0: no such rows"),
        (GATHERED, 1, drop_work, r"coverage: .* heads 0 of 2: 0 pairs computed of"),
        (GATHERED, 1, forget_a_group, r"coverage: heads .* computed of"),
        (GATHERED, 0, drop_transfer, r"read: step 1: rank 1 does not hold"),
        (GATHERED, 2, drop_transfer, r"home: rank \d still holds dkv of rank \d"),
        (BACKWARD, 1, drop_work, r"read: step 2: no partial result"),
        (BACKWARD, 4, drop_transfer, r"home: rank \d still holds dkv of rank \d"),
    ],
)
def test_planted_faults_are_found(
    plan: Plan, number: int, change: Callable[[Step], Step], complaint: str
) -> None:
    verify_plan(plan)
    with pytest.raises(PlanError, match=complaint):
        verify_plan(with_step(plan, number, change))


def test_gradients_sent_before_they_are_complete_stay_behind() -> None:
    """A sum that leaves in the step that still adds to it leaves that part at the wrong rank."""
    steps = list(BACKWARD.steps)
    early = [t for t in steps[2].transfers if t.buffer is None]
    steps[2] = replace(steps[2], transfers=tuple(t for t in steps[2].transfers if t not in early))
    steps[1] = replace(steps[1], transfers=(*steps[1].transfers, *early))
    with pytest.raises(PlanError, match="no partial result"):
        verify_plan(replace(BACKWARD, steps=tuple(steps)))
