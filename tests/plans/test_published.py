"""Idle shares and bytes of the published plans, in closed form (notes on the papers' schedules)."""

import pytest

from longctx_patch.plans import (
    AttentionShape,
    Direction,
    Operand,
    PieceTable,
    Plan,
    allgather,
    burst_backward,
    direct_ring,
    distflash,
    double_ring,
    plan_traffic,
    ring,
    verify_plan,
)
from longctx_patch.sequence.layout import contiguous, zigzag
from longctx_patch.sequence.masks import causal

TOKENS, HEAD_DIM = 512, 4096  # so many that lse, delta and the diagonal's half rows vanish
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def mean_units(plan: Plan, group: int) -> float:
    """Mean bytes sent per rank, in units of one rank's keys in bfloat16."""
    shape = AttentionShape(
        batch=1, num_heads=group, num_kv_heads=1, head_dim=HEAD_DIM, itemsize_bytes=2
    )
    sent = plan_traffic(plan, shape)
    return sum(traffic.bytes for traffic in sent) / len(sent) / (TOKENS * HEAD_DIM * 2)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("direction", Direction)
def test_idle_share_of_distflash(num_ranks: int, direction: Direction) -> None:
    pieces = PieceTable(contiguous(TOKENS * num_ranks, num_ranks), causal(TOKENS * num_ranks))
    published, balanced = (
        verify_plan(distflash(pieces, direction, balanced=balanced).plan()).idle_fraction
        for balanced in (False, True)
    )
    assert published == pytest.approx(0 if num_ranks % 2 else 1 / (num_ranks + 1), abs=2e-3)
    assert balanced == pytest.approx(0, abs=2e-3)


@pytest.mark.parametrize(
    ("balanced", "forward", "backward"),
    [
        (False, {1: 7, 2: 8.5, 4: 11.5, 8: 17.5}, {1: 13.25, 2: 15.5, 4: 20, 8: 29}),
        (True, {1: 7.5, 2: 9.5, 4: 13.5, 8: 21.5}, {1: 14, 2: 17, 4: 23, 8: 35}),
    ],
)
def test_bytes_of_distflash_on_8_ranks(
    balanced: bool, forward: dict[int, float], backward: dict[int, float]
) -> None:
    pieces = PieceTable(contiguous(TOKENS * 8, 8), causal(TOKENS * 8))
    for direction, wanted in ((FORWARD, forward), (BACKWARD, backward)):
        plan = distflash(pieces, direction, balanced=balanced).plan()
        for group, units in wanted.items():
            assert mean_units(plan, group) == pytest.approx(units, rel=2e-3)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_direct_zigzag_sends_three_quarters(num_ranks: int) -> None:
    pieces = PieceTable(zigzag(TOKENS * num_ranks, num_ranks), causal(TOKENS * num_ranks))
    forward, backward = (direct_ring(pieces, direction).plan() for direction in Direction)
    assert mean_units(forward, 4) == pytest.approx(1.5 * (num_ranks - 1))
    assert mean_units(backward, 4) == pytest.approx(3 * (num_ranks - 1))
    assert verify_plan(forward).idle_fraction == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_burst_saves_for_equal_heads_and_loses_for_grouped_ones(num_ranks: int) -> None:
    """3 g (P - 1) units against the float32 ring's 6 (P - 1): the paper's 40 % and more."""
    pieces = PieceTable(zigzag(TOKENS * num_ranks, num_ranks), causal(TOKENS * num_ranks))
    burst, plain = burst_backward(pieces).plan(), ring(pieces, BACKWARD).plan()
    assert verify_plan(burst).idle_fraction == 0
    assert mean_units(plain, 1) == pytest.approx(6 * (num_ranks - 1))
    assert mean_units(burst, 1) <= 0.6 * mean_units(plain, 1)
    assert mean_units(burst, 4) > mean_units(plain, 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("head_groups", [1, 2])
def test_all_gather_sends_all_keys_once_and_all_gradients_once(
    num_ranks: int, head_groups: int
) -> None:
    """2 (P - 1) units forward; 2 more backward, less where no query of a rank sees a key."""
    pieces = PieceTable(zigzag(TOKENS * num_ranks, num_ranks), causal(TOKENS * num_ranks))
    forward, backward = (
        allgather(pieces, direction, head_groups=head_groups).plan() for direction in Direction
    )
    assert verify_plan(forward).idle_fraction == pytest.approx(0)
    shape = AttentionShape(
        batch=1, num_heads=8, num_kv_heads=2, head_dim=HEAD_DIM, itemsize_bytes=2
    )
    unit = TOKENS * 2 * HEAD_DIM * 2
    for sent in plan_traffic(forward, shape):
        assert sent.bytes == 2 * (num_ranks - 1) * unit
    mean = sum(sent.bytes for sent in plan_traffic(backward, shape)) / num_ranks
    assert mean == (2 + 1.5) * (num_ranks - 1) * unit


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("direction", Direction)
def test_a_rank_sends_a_block_per_other_node_across(
    num_nodes: int, per_node: int, direction: Direction
) -> None:
    num_ranks = num_nodes * per_node
    pieces = PieceTable(zigzag(32 * num_ranks, num_ranks), causal(32 * num_ranks))
    plan = double_ring(pieces, direction, ranks_per_node=per_node).plan()
    verify_plan(plan)
    across = [
        (transfer.source, transfer.block.operand)
        for step in plan.steps
        for transfer in step.transfers
        if transfer.source // per_node != transfer.destination // per_node
    ]
    kinds = [Operand.KV] + [Operand.DKV_SUM] * (direction is BACKWARD)
    for rank in range(num_ranks):
        for operand in kinds:
            assert across.count((rank, operand)) == num_nodes - 1
