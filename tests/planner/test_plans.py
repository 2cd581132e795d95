"""A config runs the plan that it names; for `auto` it runs what a rule takes, as the cost model."""

from dataclasses import replace
from itertools import product

import pytest

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.degrees import decide, serves
from longctx_patch.planner.machines import MACHINES
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS, has_full_nodes
from longctx_patch.sequence.layout import LayoutName
from tests.planner.test_attention_cost import WORKLOAD

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@pytest.mark.parametrize(
    ("plan", "backward_plan", "expected"),
    [
        ("zigzag_direct", "burst", ("zigzag_direct", "burst")),
        ("distflash", "auto", ("distflash", "distflash")),
        ("burst", "auto", ("zigzag", "burst")),
    ],
)
def test_named_plans_are_taken_as_they_are(
    plan: str, backward_plan: str, expected: tuple[str, str]
) -> None:
    config = LongContextConfig(ring_degree=4, plan=plan, backward_plan=backward_plan)
    found = decide(config, WORKLOAD)
    assert (found.plan, found.backward_plan) == expected


def test_masks_run_what_sends_only_what_is_seen() -> None:
    window, packed = replace(WORKLOAD, window=4096), replace(WORKLOAD, lengths=(65536, 65536))
    config = LongContextConfig(ring_degree=4)
    found = [decide(config, workload) for workload in (window, packed)]
    assert {setting.plan_of(direction) for setting in found for direction in Direction} == {"halo"}
    assert [setting.layout for setting in found] == ["zigzag", "balanced"]
    named = replace(config, plan="ring")
    assert decide(named, window).plan == "ring"


def settings_of(layout: LayoutName, ring: int) -> list[Setting]:
    """All plans of a layout over a ring without Ulysses, in nodes of 8."""
    return [
        Setting(plan=plan, layout=layout, ulysses_degree=1, ring_degree=ring, ranks_per_node=8)
        for plan, record in PLANS.items()
        if layout in record.layouts
        and not record.is_sparse
        and (not record.needs_full_nodes or has_full_nodes(ring, 8))
    ]


LENGTHS = {"zigzag": (2048, 16384, 131072), "striped": (16384,), "balanced": (16384,)}


@pytest.mark.parametrize("ring", [4, 16])
@pytest.mark.parametrize("num_kv_heads", [8, 32])
@pytest.mark.parametrize("layout", LENGTHS)
def test_the_rule_is_as_fast_as_what_is_predicted_fastest(
    layout: LayoutName, num_kv_heads: int, ring: int
) -> None:
    """Within a node and across two, of plans that don't gather all keys."""
    config = LongContextConfig(ring_degree=ring, layout=layout)
    hardware = MACHINES[config.hardware]
    for rank_tokens, direction in product(LENGTHS[layout], Direction):
        workload = Workload(num_tokens=ring * rank_tokens, num_kv_heads=num_kv_heads)
        seconds = {
            setting.plan: predict(setting, direction, workload, hardware).makespan_s
            for setting in settings_of(layout, ring)
            if serves(setting.plan, direction) and not PLANS[setting.plan].gathers
        }
        taken = decide(config, workload).plan_of(direction)
        assert seconds[taken] <= 1.01 * min(seconds.values()), (rank_tokens, direction, seconds)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_auto_chooses_among_the_plans_of_the_layout(layout: str) -> None:
    found = decide(LongContextConfig(ring_degree=4, layout=layout), WORKLOAD)  # type: ignore[arg-type]
    assert found.layout == layout
    assert all(layout in PLANS[found.plan_of(direction)].layouts for direction in Direction)
