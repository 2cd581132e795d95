"""A config runs the plan that it names; for `auto` it runs what the cost model takes."""

from dataclasses import replace

import pytest

from longctx_patch.choose.plans import decide, settings_of
from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.machines import MACHINES
from tests.predict.attention.test_costs import WORKLOAD

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_auto_chooses_among_the_plans_of_the_layout(layout: str) -> None:
    found = decide(LongContextConfig(ring_degree=4, layout=layout), WORKLOAD)  # type: ignore[arg-type]
    assert found.layout == layout
    assert all(layout in PLANS[found.plan_of(direction)].layouts for direction in Direction)


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


def test_burst_loses_where_heads_are_grouped() -> None:
    for ring_degree in (4, 64):
        config = LongContextConfig(ring_degree=ring_degree)
        workload = replace(WORKLOAD, num_tokens=16384 * ring_degree)
        assert decide(config, workload).backward_plan != "burst"


def test_the_double_ring_beats_the_flat_one_across_nodes() -> None:
    workload, hardware = Workload(num_tokens=16 * 8192, num_kv_heads=32), MACHINES["h100"]
    seconds = {
        setting.plan: predict(setting, FORWARD, workload, hardware).makespan_s
        for setting in settings_of(LongContextConfig(ring_degree=16), hardware)
        if setting.plan in ("zigzag", "double_ring")
    }
    assert seconds["double_ring"] < 0.8 * seconds["zigzag"]
