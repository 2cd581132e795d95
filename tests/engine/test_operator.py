"""The operator against dense attention, on virtual ranks and on processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longctx_patch import (
    LongContextConfig,
    attention,
    make_sequence_group,
    run_virtual_ranks,
    virtual_group,
)
from longctx_patch.engine.call import make_plan
from longctx_patch.plans import Direction, PlanError, Schedule, make_schedule
from longctx_patch.plans.generators import setting as setting_module
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import LayoutName, make_layout
from longctx_patch.sequence.masks import causal
from longctx_patch.transport import VirtualTransport
from tests.covering import covering
from tests.engine.exact import (
    TOLERANCE,
    Case,
    Found,
    assert_exact,
    causal_row,
    config_of,
    inputs,
    one_rank,
)
from tests.harness import run_distributed
from tests.masked import dense_masked
from tests.reference import relative_error

DEGREES = [
    *((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 8)),
    *((2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2)),
]
HEADS = [(4, 4), (4, 2), (4, 1), (12, 4), (7, 7)]
RUNS: list[dict[str, Any]] = [
    {"batch": 2},
    {"share": 1.0, "batch": 2},
    {"share": 1.0, "batch": 1, "value_dim": 5},
    {"batch": 1, "value_dim": 11},
]


@pytest.mark.parametrize(
    ("degrees", "layout", "length", "heads", "dtype", "run"),
    covering(
        DEGREES,
        ["zigzag", "contiguous"],
        [1, 7, 31, 64],
        HEADS,
        [torch.float64, torch.float32],
        RUNS,
    ),
    ids=str,
)
def test_virtual_ranks_equal_dense(
    degrees: tuple[int, int],
    layout: LayoutName,
    length: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    run: dict[str, Any],
) -> None:
    """Results are exact, also where they are kept for a recompute."""
    config = config_of("auto", layout, *degrees)
    assert_exact(Case(config, causal_row(length), heads, dtype, **run))


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
    config = replace(config_of(plan, None, 1, 4), backward_plan=backward_plan)
    assert_exact(Case(config, causal_row(31)))


def test_a_wrong_plan_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_its_end(*args: Any, **kwargs: Any) -> Schedule:
        schedule = make_schedule(*args, **kwargs)
        return replace(schedule, generate=lambda s: iter(list(schedule.generate(s))[:-1]))

    monkeypatch.setattr(setting_module, "make_schedule", without_its_end)
    setting = Setting(plan="zigzag", layout="zigzag", ulysses_degree=1, ring_degree=3)
    with pytest.raises(PlanError, match="0 pairs computed"):
        make_plan(setting, Direction.FORWARD, Documents.one(101_101), causal(101_101), 1)


def run_cases(rank: int, cases: list[Case]) -> list[Found]:
    groups = {config: make_sequence_group(config) for config in {c.config: None for c in cases}}
    results = []
    for case in cases:
        groups[case.config].counters.reset()
        results.append(one_rank(groups[case.config], case))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_equal_dense(world_size: int) -> None:
    ulysses = [degree for degree in (1, 2, 3, 4) if world_size % degree == 0]
    axes = (ulysses, ["zigzag", "contiguous"], [3, 31], [(4, 2), (4, 1)], list(TOLERANCE))
    cases = [
        Case(
            LongContextConfig(ulysses_degree=u, ring_degree=world_size // u, layout=layout),
            causal_row(length),
            heads,
            dtype,
        )
        for u, layout, length, heads, dtype in covering(*axes)
    ]
    cases += [
        Case(config_of(plan, None, 1, world_size), causal_row(31), dtype=torch.float32)
        for plan in PLANS
    ]
    by_rank = run_distributed(run_cases, world_size, cases)
    for index, case in enumerate(cases):
        assert_exact(case, [results[index] for results in by_rank])


def test_one_rank_is_bitwise_the_kernel_and_sends_nothing() -> None:
    group = make_sequence_group(LongContextConfig())
    q, k, v = (torch.randn(1, 33, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out, _ = attention(q, k, v, group=group)
    stock = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
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
    case = Case(config, causal_row(61), dtype=torch.bfloat16)
    q, k, v, dout, _ = inputs(case)
    wanted = dense_masked(q, k, v, dout, case.masked.table)
    alone = case._replace(config=LongContextConfig())
    plain = one_rank(make_sequence_group(alone.config), alone).tensors
    ranks = run_virtual_ranks(8, lambda t: one_rank(virtual_group(t, config), case).tensors)
    layout = make_layout("zigzag", 61, ring=4, ulysses=2)
    for name in ("out", "dq", "dk", "dv"):
        ours = layout.unshard([tensors[name] for tensors in ranks], 1)
        bound = 2 * relative_error(plain[name], wanted[name])
        assert relative_error(ours, wanted[name]) < bound


EMPTY = r"an empty batch .*leave empty batches out"
EXPECTED = r"expected q \[B, L, H, D\], k \[B, L, G, D\] and v"


@pytest.mark.parametrize(
    ("degrees", "q_shape", "k_shape", "k_dtype", "says"),
    [
        ((2, 2), (0, 4, 2, 8), (0, 4, 2, 8), torch.float32, EMPTY),
        ((2, 2), (1, 0, 2, 8), (1, 0, 2, 8), torch.float32, EMPTY),
        ((1, 1), (1, 4, 3, 8), (1, 4, 2, 8), torch.float32, EXPECTED),
        ((1, 1), (1, 4, 2, 8), (1, 5, 2, 8), torch.float32, EXPECTED),
        ((1, 1), (1, 4, 2, 8), (1, 4, 2, 16), torch.float32, EXPECTED),
        ((1, 1), (1, 4, 2, 8), (1, 4, 2, 8), torch.float64, EXPECTED),
        ((4, 1), (1, 2, 2, 8), (1, 2, 2, 8), torch.float32, "_degree=4, but the model has 2 query"),
    ],
)
def test_tensors_that_can_not_be_right_are_refused_on_every_rank(
    degrees: tuple[int, int],
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    k_dtype: torch.dtype,
    says: str,
) -> None:
    config = LongContextConfig(ulysses_degree=degrees[0], ring_degree=degrees[1])

    def run(transport: VirtualTransport) -> None:
        q, k = torch.randn(q_shape), torch.randn(k_shape, dtype=k_dtype)
        with pytest.raises(ValueError, match=says):
            attention(q, k, k, group=virtual_group(transport, config))

    run_virtual_ranks(config.sequence_degree, run)


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


def test_sinks_of_the_caller_stay_as_they_are() -> None:
    """In a row of one token lse has the shape of the sinks and must not share their memory."""
    group = make_sequence_group(LongContextConfig())
    q, k, v = torch.randn(3, 1, 1, 2, 4).unbind(0)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    out, _ = attention(q, k, v, group=group, sinks=sinks)
    assert sinks.tolist() == [0.5, -1.0]
    score = (q * k).sum(-1, keepdim=True) / 2
    weight = torch.sigmoid(score - sinks.detach()[:, None])
    assert relative_error(out.detach(), weight * v) < 1e-6
    out.sum().backward()
