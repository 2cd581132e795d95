"""The operator against dense attention: virtual ranks for every case, gloo for a covering few."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import (
    LongContextConfig,
    attention,
    make_sequence_group,
    run_virtual_ranks,
    virtual_group,
)
from longctx_patch.engine.call import CallShape, make_plan
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.operator import distributed_attention
from longctx_patch.engine.traffic import predicted_traffic
from longctx_patch.operator.decided import causal_call
from longctx_patch.plans import Direction, PlanError, Schedule, make_schedule
from longctx_patch.plans.generators import setting as setting_module
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName, make_layout
from longctx_patch.sequence.masks import causal
from longctx_patch.transport import VirtualTransport
from tests.harness import run_distributed
from tests.reference import dense_attention, relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DEGREES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2)]
HEADS = [(4, 4), (4, 2), (4, 1), (12, 4), (7, 7)]
BATCH, HEAD_DIM = 2, 8

Case = tuple[LongContextConfig, int, tuple[int, int], torch.dtype]


def whole_inputs(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, dout of the whole sequence, the same wherever they are made."""
    _, length, (heads, kv_heads), dtype = case
    generator = torch.Generator().manual_seed(length * 100 + heads)
    q, dout = torch.randn(2, BATCH, length, heads, HEAD_DIM, generator=generator, dtype=dtype)
    k, v = torch.randn(2, BATCH, length, kv_heads, HEAD_DIM, generator=generator, dtype=dtype)
    return q, k, v, dout


def one_rank(group: SequenceGroup, case: Case) -> tuple[list[Tensor], Traffic, Traffic]:
    """((out, lse, dq, dk, dv) of this rank, what it sent, what was predicted)."""
    length = case[1]
    layout = group.layout(length)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole_inputs(case))
    for x in (q, k, v):
        x.requires_grad_()
    call = causal_call(group, length, HEAD_DIM**-0.5, CallShape.of(q, k))
    predicted = predicted_traffic(call)
    out, _ = distributed_attention(q, k, v, None, call)
    out.backward(dout)
    counters = group.counters
    sent = Traffic(counters.messages, counters.bytes)
    with torch.no_grad():
        _, lse = attention(q, k, v, group=group, num_tokens=length)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    grads = [q.grad, k.grad, v.grad]
    return [out.detach(), lse, *grads], sent, predicted.forward + predicted.backward


def assert_exact(case: Case, ranks: list[tuple[list[Tensor], Traffic, Traffic]]) -> None:
    config, length, _, dtype = case
    layout = make_layout(
        config.placement, length, ring=config.ring_degree, ulysses=config.ulysses_degree
    )
    names = ("out", "lse", "dq", "dk", "dv")
    wanted = dense_attention(*whole_inputs(case))
    for index, (name, reference) in enumerate(zip(names, wanted, strict=True)):
        shards = [tensors[index] for tensors, _, _ in ranks]
        error = relative_error(layout.unshard(shards, 2 if name == "lse" else 1), reference)
        assert error < TOLERANCE[dtype], f"{name} of {case}: {error}"
    for rank, (_, sent, predicted) in enumerate(ranks):
        assert sent == predicted, f"rank {rank} of {case}"


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [1, 7, 31, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_virtual_ranks_equal_dense(
    degrees: tuple[int, int], layout: LayoutName, length: int, dtype: torch.dtype
) -> None:
    config = LongContextConfig(ulysses_degree=degrees[0], ring_degree=degrees[1], layout=layout)
    for heads in HEADS:
        case = (config, length, heads, dtype)

        def run(transport: VirtualTransport, case: Case = case) -> Any:
            return one_rank(virtual_group(transport, case[0]), case)

        assert_exact(case, run_virtual_ranks(config.sequence_degree, run))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("degrees", [(2, 2), (2, 3), (3, 2), (1, 4)], ids=str)
def test_ulysses_times_every_plan(plan: str, degrees: tuple[int, int]) -> None:
    config = LongContextConfig(
        ulysses_degree=degrees[0],
        ring_degree=degrees[1],
        plan=plan,
        ranks_per_node=1 + (degrees[1] == 4) if plan == "double_ring" else None,
    )
    for heads in HEADS:
        case: Case = (config, 31, heads, torch.float64)

        def run(transport: VirtualTransport, case: Case = case) -> Any:
            return one_rank(virtual_group(transport, case[0]), case)

        assert_exact(case, run_virtual_ranks(config.sequence_degree, run))


@pytest.mark.parametrize(
    ("plan", "backward_plan"),
    [
        ("zigzag_direct", "burst"),
        ("double_ring", "zigzag"),
        ("distflash_balanced", "ring"),
        ("ring", "distflash"),
    ],
)
def test_forward_and_backward_by_different_plans(plan: str, backward_plan: str) -> None:
    config = LongContextConfig(
        ring_degree=4,
        plan=plan,
        backward_plan=backward_plan,
        ranks_per_node=2 if plan == "double_ring" else None,
    )
    case: Case = (config, 31, (4, 2), torch.float64)
    ranks = run_virtual_ranks(4, lambda t: one_rank(virtual_group(t, config), case))
    assert_exact(case, ranks)


def test_a_wrong_plan_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_its_end(*args: Any, **kwargs: Any) -> Schedule:
        schedule = make_schedule(*args, **kwargs)
        return replace(schedule, stages=lambda: iter(list(schedule.stages())[:-1]))

    monkeypatch.setattr(setting_module, "make_schedule", without_its_end)
    setting = Setting(plan="zigzag", layout="zigzag", ulysses_degree=1, ring_degree=3)
    with pytest.raises(PlanError, match="0 pairs computed"):
        make_plan(setting, Direction.FORWARD, Documents.one(101_101), causal(101_101), 1)


def plan_config(num_ranks: int, plan: str) -> LongContextConfig:
    size = 1 + (num_ranks % 2 == 0) if plan == "double_ring" else None
    return LongContextConfig(ring_degree=num_ranks, plan=plan, ranks_per_node=size)  # type: ignore[arg-type]


def run_cases(rank: int, cases: list[Case]) -> list[Any]:
    groups = {case[0]: None for case in cases}
    made = {config: make_sequence_group(config) for config in groups}
    results = []
    for case in cases:
        made[case[0]].counters.reset()
        results.append(one_rank(made[case[0]], case))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_equal_dense(world_size: int) -> None:
    layouts: tuple[LayoutName, ...] = ("zigzag", "contiguous")
    cases: list[Case] = [
        (
            LongContextConfig(
                ulysses_degree=ulysses, ring_degree=world_size // ulysses, layout=layout
            ),
            length,
            heads,
            dtype,
        )
        for ulysses in (1, 2, 3, 4)
        if world_size % ulysses == 0
        for layout in layouts
        for length in (3, 31)
        for heads in ((4, 2), (4, 1))
        for dtype in (torch.float64, torch.float32)
    ]
    cases += [(plan_config(world_size, plan), 31, (4, 2), torch.float32) for plan in PLANS]
    by_rank = run_distributed(run_cases, world_size, cases)
    for index, case in enumerate(cases):
        assert_exact(case, [results[index] for results in by_rank])


def test_one_rank_is_bitwise_the_kernel_and_sends_nothing() -> None:
    group = make_sequence_group(LongContextConfig())
    q, k, v = (torch.randn(1, 33, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out, _ = attention(q, k, v, group=group)
    stock = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert torch.equal(out, stock)
    dout = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, stock))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (group.counters.messages, group.counters.kernel_calls) == (0, 2)


def test_tensors_of_any_stride() -> None:
    group = make_sequence_group(LongContextConfig())
    q, k, v = (torch.randn(1, heads, 8, 33).permute(0, 3, 1, 2) for heads in (4, 2, 2))
    found, _ = attention(q, k, v, group=group)
    wanted, _ = attention(q.contiguous(), k.contiguous(), v.contiguous(), group=group)
    assert relative_error(found, wanted) < 1e-6


def test_second_derivatives_are_refused() -> None:
    config = LongContextConfig(ring_degree=2)

    def run(transport: VirtualTransport) -> None:
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        out, _ = attention(x, x, x, group=virtual_group(transport, config))
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run_virtual_ranks(2, run)


def test_bfloat16_error_is_at_most_twice_the_plain_kernels() -> None:
    config = LongContextConfig(ulysses_degree=2, ring_degree=4)
    case: Case = (config, 61, (4, 2), torch.bfloat16)
    inputs = whole_inputs(case)
    wanted = dense_attention(*inputs)
    alone = LongContextConfig()
    plain = one_rank(make_sequence_group(alone), (alone, *case[1:]))[0]
    ranks = run_virtual_ranks(8, lambda t: one_rank(virtual_group(t, config), case)[0])
    layout = make_layout("zigzag", 61, ring=4, ulysses=2)
    for index in (0, 2, 3, 4):
        ours = layout.unshard([tensors[index] for tensors in ranks], 1)
        bound = 2 * relative_error(plain[index], wanted[index])
        assert relative_error(ours, wanted[index]) < bound


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (1, 0)])
def test_nothing_to_attend_to_is_refused_on_every_rank(batch: int, length: int) -> None:
    config = LongContextConfig(ulysses_degree=2, ring_degree=2)

    def run(transport: VirtualTransport) -> None:
        x = torch.randn(batch, length, 2, 8)
        with pytest.raises(ValueError, match=r"an empty batch .*leave empty batches out"):
            attention(x, x, x, group=virtual_group(transport, config))

    run_virtual_ranks(4, run, timeout_s=20)


def test_ranks_that_disagree_are_refused_everywhere() -> None:
    config = LongContextConfig(ring_degree=2)

    def run(transport: VirtualTransport) -> str:
        length = 8 if transport.group_rank == 0 else 6
        x = torch.randn(1, length, 2, 8)
        with pytest.raises(ValueError, match="must hold shards of one sequence") as caught:
            attention(x, x, x, group=virtual_group(transport, config), num_tokens=16)
        assert transport.counters.messages == 0
        return str(caught.value)

    for message in run_virtual_ranks(2, run):
        assert "rank 1: 6 of 16 tokens, batch 1, heads 2, " in message


def test_one_rank_with_bad_tensors_stops_all() -> None:
    config = LongContextConfig(ring_degree=2)

    def run(transport: VirtualTransport) -> None:
        x = torch.randn(1, 8, 2, 8)
        k = x[0] if transport.group_rank == 1 else x
        message = (
            "expected q"
            if transport.group_rank == 1
            else "rank 1 of the group refused: .*expected q"
        )
        with pytest.raises(ValueError, match=message):
            attention(x, k, k, group=virtual_group(transport, config))

    run_virtual_ranks(2, run)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((1, 4, 3, 8), (1, 4, 2, 8)), torch.float32),
        (((1, 4, 2, 8), (1, 5, 2, 8)), torch.float32),
        (((1, 4, 2, 8), (1, 4, 2, 16)), torch.float32),
        (((1, 4, 2, 8), (1, 4, 2, 8)), torch.float64),
    ],
)
def test_shapes_are_checked(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    q, k = torch.randn(shapes[0]), torch.randn(shapes[1], dtype=dtype)
    with pytest.raises(ValueError, match=r"expected q \[B, L, H, D\] and k, v \[B, L, G, D\]"):
        attention(q, k, k, group=make_sequence_group(LongContextConfig()))


def test_more_ulysses_ranks_than_heads_are_refused() -> None:
    config = LongContextConfig(ulysses_degree=4)

    def run(transport: VirtualTransport) -> None:
        x = torch.randn(1, 2, 2, 8)
        with pytest.raises(ValueError, match=r"ulysses_degree=4, but the model has 2 query heads"):
            attention(x, x, x, group=virtual_group(transport, config))

    run_virtual_ranks(4, run)


def test_degrees_that_do_not_fit_the_world_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 x ring_degree=2 = 4 .* 1 process runs.*num_processes: 4"
    ):
        make_sequence_group(LongContextConfig(ulysses_degree=2, ring_degree=2))


def test_sinks_of_the_caller_stay_as_they_are() -> None:
    """Of one token, whose lse has the sinks' own shape."""
    group = make_sequence_group(LongContextConfig())
    q, k, v = torch.randn(3, 1, 1, 2, 4).unbind(0)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    out, _ = attention(q, k, v, group=group, sinks=sinks)
    assert sinks.tolist() == [0.5, -1.0]
    score = (q * k).sum(-1, keepdim=True) / 2
    weight = torch.sigmoid(score - sinks.detach()[:, None])
    assert relative_error(out.detach(), weight * v) < 1e-6
    out.sum().backward()
