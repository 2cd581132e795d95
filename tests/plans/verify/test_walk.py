"""A right plan is broken in each way that gives wrong numbers; the complaint names the rule."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from longctx_patch.plans import (
    Block,
    Direction,
    Operand,
    Plan,
    PlanError,
    Share,
    Step,
    Transfer,
    verify_plan,
)
from longctx_patch.sequence.layout import Interval, Layout, Rows, striped, zigzag
from longctx_patch.sequence.masks import causal
from longctx_patch.sequence.regions import CAUSAL, FULL, Piece
from tests.plans.random_masks import make_plan

R = Interval


def made(name: str, direction: Direction, layout: Layout) -> Plan:
    return make_plan(name, layout, causal(layout.num_tokens), direction)


FORWARD, BACKWARD = (made("zigzag", direction, zigzag(32, 4)) for direction in Direction)
GATHERED = made("allgather", Direction.BACKWARD, zigzag(32, 4))


def with_step(plan: Plan, number: int, change: Callable[[Step], Step]) -> Plan:
    steps = list(plan.steps)
    steps[number] = change(steps[number])
    return replace(plan, steps=tuple(steps))


def with_work(step: Step, **fields: Any) -> Step:
    """The step with other fields of its first work."""
    return replace(step, works=(step.works[0]._replace(**fields), *step.works[1:]))


def with_piece(piece: Piece) -> Callable[[Step], Step]:
    """One more piece in the first work."""
    return lambda step: with_work(step, pieces=(*step.works[0].pieces, piece))


def with_transfer(**fields: Any) -> Callable[[Step], Step]:
    """One more transfer, like the first but for some fields of it or of its block."""

    def change(step: Step) -> Step:
        first = step.transfers[0]
        of_block = {name: value for name, value in fields.items() if name in Block._fields}
        of_transfer = {name: value for name, value in fields.items() if name not in of_block}
        block = first.block._replace(**of_block)
        more = first._replace(block=block, **{"buffer": 9, **of_transfer})
        return replace(step, transfers=(*step.transfers, more))

    return change


def drop_work(step: Step) -> Step:
    return replace(step, works=step.works[1:])


def repeat_work(step: Step) -> Step:
    return replace(step, works=(*step.works, step.works[0]))


def see_the_future(step: Step) -> Step:
    return with_work(step, pieces=(step.works[0].pieces[0]._replace(rule=FULL),))


def nothing_to_rank_0(step: Step) -> Step:
    """The step without transfers to rank 0, even of keys that it doesn't use: it gathers all."""
    return replace(step, transfers=tuple(t for t in step.transfers if t.destination != 0))


def drop_transfer(step: Step) -> Step:
    return replace(step, transfers=step.transfers[1:])


def forget_a_group(step: Step) -> Step:
    return replace(step, works=())


@pytest.mark.parametrize(
    ("plan", "number", "change", "complaint"),
    [
        (FORWARD, 1, drop_work, r"coverage: .* 0 pairs computed of"),
        (FORWARD, 1, repeat_work, r"coverage: .* overlap"),
        (FORWARD, 0, see_the_future, r"coverage: .* not allowed"),
        (FORWARD, 0, drop_transfer, r"read: step 1: rank 1 does not hold"),
        (FORWARD, 1, with_transfer(buffer=0), r"step 1: rank 1 overwrites buffer 0 while reading"),
        (FORWARD, 0, with_transfer(buffer=0), r"step 0: rank 1 has 2 transfers land in buffer 0"),
        (FORWARD, 0, with_transfer(destination=0), r"transfer: step 0: a rank sends to itself"),
        (FORWARD, 0, with_transfer(destination=9), r"transfer: step 0: no such rank"),
        (FORWARD, 0, with_transfer(rows=Rows(())), r"transfer: step 0: no such rows"),
        (FORWARD, 0, with_piece(Piece(R(0, 8), R(0, 4), CAUSAL)), r"a causal piece is a square"),
        (FORWARD, 0, with_piece(Piece(R(3, 3), R(2, 5))), r"work: step 0: no such rows"),
        (FORWARD, 0, with_piece(Piece(R(0, 8), R(7, 9))), r"work: step 0: no such rows"),
        (FORWARD, 0, with_piece(Piece(R(0, 8, 2), R(0, 4))), r"work: step 0: no such rows"),
        (GATHERED, 1, with_piece(Piece(R(0, 4), R(-2, 2))), r"work: step 1: no such rows"),
        (FORWARD, 0, partial(with_work, pieces=()), r"work: step 0: no pieces"),
        (FORWARD, 0, partial(with_work, rank=9), r"work: step 0: no such rank"),
        (FORWARD, 0, partial(with_work, rank=-1), r"work: step 0: no such rank"),
        (FORWARD, 0, with_transfer(rows=Rows((R(0, 4, 2),))), r"transfer: step 0: no such rows"),
        (FORWARD, 0, with_transfer(owner=4), r"transfer: step 0: no such rank"),
        (FORWARD, 0, with_transfer(heads=Share(0, 0)), r"transfer: step 0: no such heads"),
        (FORWARD, 0, with_transfer(heads=Share(5, 2)), r"transfer: step 0: no such heads"),
        (FORWARD, 0, with_transfer(operand=Operand.Q_BACKWARD), r"forward has no q_backward"),
        (BACKWARD, 0, with_transfer(operand=Operand.Q), r"backward has no q"),
        (FORWARD, 0, with_transfer(buffer=None), r"inputs land in buffers, results don't"),
        (GATHERED, 0, nothing_to_rank_0, r"read: step 1: rank 0 does not hold"),
        (GATHERED, 1, drop_work, r"coverage: heads 0 of 2: .* 0 pairs computed of"),
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


def test_a_result_goes_on_with_all_rows_it_came_with() -> None:
    """A result sent on with fewer rows than arrived would be a message of another size."""
    plan = made("burst", Direction.BACKWARD, striped(7, 3))
    number, home = next(
        (number, transfer)
        for number, step in enumerate(plan.steps)
        for transfer in step.transfers
        if transfer.block.operand is Operand.DQ
        and transfer.block.rows.size < plan.layout.sizes[transfer.block.owner]
    )
    between = next(r for r in range(3) if r not in (home.source, home.destination))
    rows = Rows.first(plan.layout.sizes[home.block.owner])
    detour = Transfer(home.source, between, home.block._replace(rows=rows), None)
    steps = list(plan.steps)
    kept = tuple(t for t in steps[number].transfers if t is not home)
    steps[number] = replace(steps[number], transfers=(*kept, detour))
    steps.append(Step((home._replace(source=between),), ()))
    with pytest.raises(PlanError, match="rows left behind"):
        verify_plan(replace(plan, steps=tuple(steps)))


def test_gradients_sent_before_they_are_complete_stay_behind() -> None:
    """If a sum is sent in a step that still adds to it, that addition stays at the wrong rank."""
    steps = list(BACKWARD.steps)
    early = [t for t in steps[2].transfers if t.buffer is None]
    steps[2] = replace(steps[2], transfers=tuple(t for t in steps[2].transfers if t not in early))
    steps[1] = replace(steps[1], transfers=(*steps[1].transfers, *early))
    with pytest.raises(PlanError, match="no partial result"):
        verify_plan(replace(BACKWARD, steps=tuple(steps)))
