"""Plans with one random change: those that the verifier accepts are exact all the same."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from longctx_patch.engine import call
from longctx_patch.planner.attention_cost import Workload
from longctx_patch.planner.degrees import decide
from longctx_patch.plans import Direction, Plan, PlanError, Share, Step, Transfer, Work, verify_plan
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.sequence.masks import causal
from longctx_patch.sequence.regions import ANTICAUSAL, CAUSAL, FULL, Band
from tests.engine.exact import Case, assert_exact, causal_row, config_of

RULES = (FULL, CAUSAL, ANTICAUSAL, Band(-2, 1), Band(None, 1))


def nudged(rows: Interval, random: Random) -> Interval:
    ends = (rows.start + random.choice((-1, 0, 0, 1)), rows.stop + random.choice((-1, 0, 0, 1)))
    return Interval(*ends, random.choice((1, 1, 1, 2)))


def nudged_rows(rows: Rows, random: Random) -> Rows:
    return Rows(tuple(nudged(run, random) for run in rows.runs))


def changed_transfer(transfer: Transfer, num_ranks: int, random: Random) -> Transfer:
    block, rank = transfer.block, random.randrange(-1, num_ranks + 1)
    return random.choice(
        (
            transfer._replace(source=rank),
            transfer._replace(destination=rank),
            transfer._replace(buffer=random.choice((None, 0, 1, 2, 5))),
            transfer._replace(block=block._replace(owner=rank)),
            transfer._replace(block=block._replace(rows=nudged_rows(block.rows, random))),
            transfer._replace(block=block._replace(operand=random.choice(list(type(block[0]))))),
            transfer._replace(block=block._replace(heads=Share(random.randrange(3), 2))),
        )
    )


def changed_work(work: Work, num_ranks: int, random: Random) -> Work:
    rank, piece = random.randrange(-1, num_ranks + 1), random.choice(work.pieces)
    other = random.choice(
        (
            piece._replace(q=nudged(piece.q, random)),
            piece._replace(kv=nudged(piece.kv, random)),
            piece._replace(rule=random.choice([r for r in RULES if r != piece.rule])),
        )
    )
    pieces = tuple(other if p is piece else p for p in work.pieces)
    return random.choice(
        (
            work._replace(rank=rank),
            work._replace(q_owner=rank),
            work._replace(kv_owner=rank),
            work._replace(pieces=pieces),
            work._replace(pieces=work.pieces[1:]),
        )
    )


def changed_step(step: Step, num_ranks: int, random: Random) -> Step:
    """Drop, repeat, reorder or change one transfer or work."""
    field = random.choice([name for name in ("transfers", "works") if getattr(step, name)])
    items = list(getattr(step, field))
    at = random.randrange(len(items))
    kind = random.choice(("drop", "repeat", "reorder", "change", "change", "change"))
    if kind == "drop":
        del items[at]
    elif kind == "repeat":
        items.append(items[at])
    elif kind == "reorder":
        random.shuffle(items)
    elif isinstance(items[at], Transfer):
        items[at] = changed_transfer(items[at], num_ranks, random)
    else:
        items[at] = changed_work(items[at], num_ranks, random)
    return replace(step, **{field: tuple(items)})


def mutant(plan: Plan, random: Random) -> Plan:
    steps = list(plan.steps)
    at = random.choice([n for n, step in enumerate(steps) if step.transfers or step.works])
    if random.random() < 0.15:
        other = random.randrange(len(steps))
        steps[at], steps[other] = steps[other], steps[at]
    else:
        steps[at] = changed_step(steps[at], plan.num_ranks, random)
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_the_verifier_passes_is_exact(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, outcomes = Random(num_ranks), Counter[str]()
    for name, layout in ((n, layout) for n, record in PLANS.items() for layout in record.layouts):
        case = Case(config_of(name, layout, 1, num_ranks), causal_row(13))
        plans = plans_of(case)
        for direction, plan in plans.items():
            for _ in range(7):
                changed = plans | {direction: mutant(plan, random)}
                try:
                    verify_plan(changed[direction])
                except PlanError:
                    outcomes["rejected"] += 1
                    continue
                monkeypatch.setattr(call, "make_plan", lambda _, d, *rest, p=changed: p[d])
                assert_exact(case)
                outcomes["exact"] += 1
    assert min(outcomes["rejected"], outcomes["exact"]) > 30


def plans_of(case: Case) -> dict[Direction, Plan]:
    """The plans that the ranks run if none is changed."""
    row, heads = case.masked.documents, case.heads[1]
    setting = decide(case.config, Workload(num_tokens=row.num_tokens, num_kv_heads=heads))
    return {d: setting.schedule(d, row, causal(row.num_tokens), heads).plan() for d in Direction}
