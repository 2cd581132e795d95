"""Comparisons mark what the chooser takes as chosen."""

from dataclasses import replace
from itertools import product

import pytest

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.compare import compare
from longctx_patch.planner.degrees import best_way, decide
from longctx_patch.plans import Direction
from tests.planner.test_attention_cost import H200, WORKLOAD, masked

BACKWARD = Direction.BACKWARD
EQUAL_HEADS = replace(WORKLOAD, num_kv_heads=32)


@pytest.mark.parametrize(
    ("workload", "plans"),
    [
        (masked(64), {("halo", "balanced", 1), ("halo", "balanced", 2), ("ulysses", "zigzag", 4)}),
        (
            masked(None),
            {
                *product(("halo",), ("zigzag", "contiguous"), (1, 2)),
                ("ulysses", "zigzag", 4),
            },
        ),
    ],
    ids=["packed", "window"],
)
def test_masks_are_compared_over_what_sends_only_what_is_seen(
    workload: Workload, plans: set[tuple[str, str, int]]
) -> None:
    comparison = compare(workload, H200, 4)
    found = [row.prediction for row in comparison.rows]
    assert {(row.plan, row.layout, row.ulysses_degree) for row in found} == plans
    chosen = [row.prediction for row in comparison.rows if row.chosen]
    best = min(found, key=lambda row: (row.direction is BACKWARD, row.makespan_s))
    assert [row.plan for row in chosen] == ["halo", "halo"]
    assert chosen[0] == best
    config = "LongContextConfig(ulysses_degree=1, ring_degree=4"
    config += ")" if workload.lengths else ", layout='contiguous')"
    assert config in str(comparison)


@pytest.mark.parametrize(
    ("workload", "ranks"),
    [
        (WORKLOAD, 2),
        (WORKLOAD, 16),
        (EQUAL_HEADS, 8),
        (replace(WORKLOAD, num_kv_heads=1), 8),
        (replace(WORKLOAD, num_tokens=5000), 4),
        (masked(64), 4),
    ],
)
def test_what_is_chosen_is_what_the_chooser_takes(workload: Workload, ranks: int) -> None:
    rows = compare(workload, H200, ranks).rows
    chosen = [row.prediction for row in rows if row.chosen]
    way = best_way({workload: 1}, H200, ranks)
    taken = decide(way.applied_to(LongContextConfig()), workload, H200)
    assert chosen == [predict(taken, direction, workload, H200) for direction in Direction]
    assert [row.slower for row in rows if row.chosen] == [0, 0]
