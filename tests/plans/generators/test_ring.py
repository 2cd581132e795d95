import pytest

from longctx_patch.config import LayoutName
from longctx_patch.plans import (
    AttentionShape,
    Direction,
    PieceTable,
    Plan,
    plan_traffic,
    ring,
    verify_plan,
)
from longctx_patch.plans.pieces import slot_pieces
from longctx_patch.sequence.layout import Layout, contiguous, make_layout, zigzag
from longctx_patch.sequence.masks import causal
from longctx_patch.sequence.regions import CAUSAL

SHAPE = AttentionShape(batch=2, num_heads=8, num_kv_heads=2, head_dim=16, itemsize_bytes=2)


def forward_plan(layout: Layout) -> Plan:
    return ring(PieceTable(layout, causal(layout.num_tokens)), Direction.FORWARD).plan()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 97, 128])
@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_plans_are_right(num_ranks: int, num_tokens: int, name: LayoutName) -> None:
    layout = make_layout(name, num_tokens, ring=num_ranks)
    for direction in Direction:
        report = verify_plan(ring(PieceTable(layout, causal(layout.num_tokens)), direction).plan())
        assert report.area == num_tokens * (num_tokens + 1) // 2


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zigzag_has_no_idle_time_and_one_kernel_call_a_step(num_ranks: int) -> None:
    plan = forward_plan(zigzag(32 * num_ranks, num_ranks))
    assert verify_plan(plan).idle_fraction == 0
    for step in plan.steps:
        assert [len(work.pieces) for work in step.works] == [1] * num_ranks


def test_plain_ring_idles_towards_a_half() -> None:
    idle = verify_plan(forward_plan(contiguous(1024, 8))).idle_fraction
    # Makespan P - 1/2 blocks for P / 2 blocks of work, up to the diagonal's half rows.
    assert idle == pytest.approx(1 - 4 / 7.5, abs=2e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_bytes_are_the_closed_forms(num_ranks: int) -> None:
    tokens = 16
    layout = zigzag(tokens * num_ranks, num_ranks)
    block = tokens * SHAPE.batch * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.itemsize_bytes
    hops = num_ranks - 1
    for sent in plan_traffic(forward_plan(layout), SHAPE):
        assert (sent.messages, sent.bytes) == (hops, 2 * hops * block)
    # Keys and values in bfloat16, their gradients in float32: 2 + 4 units, each over P - 1 hops.
    backward = ring(PieceTable(layout, causal(layout.num_tokens)), Direction.BACKWARD).plan()
    for sent in plan_traffic(backward, SHAPE):
        assert (sent.messages, sent.bytes) == (2 * hops, (2 + 4) * hops * block)


def test_the_diagonal_of_zigzag_is_one_causal_square() -> None:
    (piece,) = slot_pieces(zigzag(16, 2), causal(16), 0, 0)
    assert piece.rule == CAUSAL
    assert piece.q.size == 8
