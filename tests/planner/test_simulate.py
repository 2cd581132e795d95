"""The simulator agrees with closed forms, the verifier and the traffic of the same plans."""

from dataclasses import replace
from math import inf

import pytest

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Workload, predict
from longctx_patch.planner.machines import MACHINES, Hardware, KernelRate, KernelRates, Link
from longctx_patch.planner.simulate import Simulation, simulate
from longctx_patch.plans import (
    AttentionShape,
    Direction,
    Schedule,
    make_schedule,
    plan_traffic,
    verify_plan,
)
from longctx_patch.plans.generators.table import PLANS, plan_for
from longctx_patch.sequence.layout import make_layout
from longctx_patch.sequence.masks import causal
from tests.counting import count_calls

SHAPE = AttentionShape(batch=1, num_heads=32, num_kv_heads=8, head_dim=128, itemsize_bytes=2)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TOKENS = 4096  # tokens of a rank
FLOPS = 1e15


def kernels(flops: float) -> KernelRates:
    """Kernel rates at which every block runs at `flops`, without a start-up time."""
    rate = KernelRate(flops, 0, 0)
    return KernelRates(
        kernel="none",
        forward_full=rate,
        forward_causal=rate,
        backward_full=rate,
        backward_causal=rate,
    )


ATTENTION_ALONE = replace(
    MACHINES["h100"].with_free_links(),
    kernels=kernels(FLOPS),
    copy_bandwidth=inf,
    add_bandwidth=inf,
    merge_bandwidth=inf,
    host_forward_s=0,
    host_backward_s=0,
    host_exchange_s=0,
    host_ulysses_s=0,
    host_message_s=0,
)
FREE_KERNELS = replace(ATTENTION_ALONE, kernels=kernels(inf))
MESSAGES_ALONE = replace(
    FREE_KERNELS,
    intra_node=Link(200e9, 10e-6),
    inter_node=Link(20e9, 30e-6),
)


def named(plan: str, direction: Direction, num_ranks: int, *, per_node: int = 1) -> Schedule:
    layout = make_layout(PLANS[plan].layouts[0], TOKENS * num_ranks, ring=num_ranks)
    return make_schedule(
        plan_for(plan, direction, "zigzag"),
        direction,
        layout,
        causal(layout.num_tokens),
        num_kv_heads=8,
        ranks_per_node=per_node,
    )


def played(schedule: Schedule, hardware: Hardware, *, per_node: int = 8) -> Simulation:
    return simulate(schedule, SHAPE, hardware, ranks_per_node=per_node)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("num_ranks", "direction"),
    [(1, BACKWARD), (2, FORWARD), (3, BACKWARD), (4, FORWARD), (5, FORWARD), (8, BACKWARD)],
)
def test_counts_are_those_of_the_executed_plan(
    plan: str, num_ranks: int, direction: Direction
) -> None:
    schedule = named(plan, direction, num_ranks)
    found = played(schedule, MACHINES["h200"])
    executed = schedule.plan()
    sent = plan_traffic(executed, SHAPE)
    assert found.bytes_sent == tuple(traffic.bytes for traffic in sent)
    assert found.messages == tuple(traffic.messages for traffic in sent)
    assert found.idle_fraction == pytest.approx(verify_plan(executed).idle_fraction, abs=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4, 5, 8, 16])
@pytest.mark.parametrize("direction", Direction)
def test_attention_alone_takes_the_published_number_of_blocks(
    num_ranks: int, direction: Direction
) -> None:
    """A block is one rank's queries times one rank's keys; one on the diagonal counts half."""
    products = 2 if direction is FORWARD else 5
    block_s = 2 * products * TOKENS**2 * SHAPE.num_heads * SHAPE.head_dim / FLOPS
    even = num_ranks % 2 == 0
    blocks = {
        **dict.fromkeys(PLANS, num_ranks / 2),
        "ring": num_ranks - 1 / 2,
        "distflash": (num_ranks + even) / 2,
    }
    for plan, wanted in blocks.items():
        found = played(named(plan, direction, num_ranks), ATTENTION_ALONE).makespan_s
        assert found == pytest.approx(wanted * block_s, rel=1e-3), plan


def test_branches_take_the_pairs_that_they_see() -> None:
    workload = Workload(num_tokens=64_000, lengths=(60_000, 2000, 2000), parents=(-1, 0, 0))
    config = LongContextConfig(ring_degree=2)
    setting = config.setting_of("balanced", num_tokens=64_000, reuse=4, is_causal=False)
    pairs = sum(begins * n + n * (n + 1) // 2 for begins, n in ((0, 60_000), *[(60_000, 2000)] * 2))
    found = predict(setting, FORWARD, workload, ATTENTION_ALONE)
    assert found.kernel_s == pytest.approx(4 * pairs * 32 * 128 / FLOPS / 2)
    assert found.idle_fraction < 0.01


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_messages_alone_take_one_hop_a_step(num_ranks: int) -> None:
    block = 2 * TOKENS * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    near = played(named("zigzag", FORWARD, num_ranks), MESSAGES_ALONE)
    assert near.makespan_s == pytest.approx((num_ranks - 1) * (10e-6 + block / 200e9))
    assert near.exposed_communication_s == pytest.approx(near.makespan_s)
    far = played(named("zigzag", FORWARD, num_ranks), MESSAGES_ALONE, per_node=1)
    assert far.makespan_s == pytest.approx((num_ranks - 1) * (30e-6 + block / 20e9))


@pytest.mark.parametrize(("direction", "seconds"), [(FORWARD, 1.0), (BACKWARD, 2.0)])
def test_the_cpu_alone_takes_its_time_for_each_call(direction: Direction, seconds: float) -> None:
    """Over contiguous shards the last rank sees every block, with one call for each."""
    slow_cpu = replace(FREE_KERNELS, host_forward_s=1.0, host_backward_s=2.0)
    found = played(named("ring", direction, 4), slow_cpu)
    assert found.makespan_s == pytest.approx(4 * seconds)


def test_the_double_ring_waits_less_for_slow_links_than_the_flat_ring() -> None:
    """A flat ring over 2 nodes is slow at every step; a double ring sends across in a window."""
    flat = played(named("zigzag", FORWARD, 16), MESSAGES_ALONE)
    double = played(named("double_ring", FORWARD, 16, per_node=8), MESSAGES_ALONE)
    block = 2 * TOKENS * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    across, within = 30e-6 + block / 20e9, 10e-6 + block / 200e9
    assert flat.makespan_s == pytest.approx(15 * across)
    assert double.makespan_s == pytest.approx(across + 13 * within)


def test_a_ring_holds_two_blocks_and_the_copy_of_its_own() -> None:
    block = 2 * TOKENS * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    assert played(named("zigzag", FORWARD, 8), MACHINES["h100"]).peak_buffer_bytes == 3 * block


def test_a_block_is_copied_once_however_often_it_is_sent() -> None:
    """Where links and kernels take no time, a plan takes the time of one copy of each block."""
    block = 2 * TOKENS * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    copies = replace(FREE_KERNELS, copy_bandwidth=1e12)
    for plan in ("zigzag", "double_ring", "allgather"):
        found = played(named(plan, FORWARD, 8, per_node=4), copies).makespan_s
        closing = TOKENS * SHAPE.num_heads * SHAPE.head_dim * (4 + 2)
        gathering = 2 * 8 * block if plan == "allgather" else 0
        assert found == pytest.approx((2 * block + gathering + closing) / 1e12), plan


@pytest.mark.parametrize("plan", ["double_ring", "distflash_balanced"])
def test_a_stage_of_many_ranks_takes_as_many_calls_as_one_of_few(plan: str) -> None:
    """Ranks are entries of arrays, so only the number of stages grows with the ranks."""

    def calls_per_rank(num_ranks: int) -> float:
        schedule = named(plan, FORWARD, num_ranks, per_node=8)
        return count_calls(lambda: played(schedule, MACHINES["h100"])) / num_ranks

    assert calls_per_rank(256) < 1.2 * calls_per_rank(64) < 2000


def test_free_links_expose_nothing() -> None:
    for plan in PLANS:
        found = played(named(plan, BACKWARD, 8), MACHINES["h100"].with_free_links())
        assert found.exposed_communication_s == 0
