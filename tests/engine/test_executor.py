"""Every plan on virtual ranks against dense attention, and its real traffic against its own."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longctx_patch.engine.executor import Executor, out_with_row_dots, row_dots
from longctx_patch.kernels import Score, available
from longctx_patch.plans import (
    AttentionShape,
    Direction,
    Plan,
    make_schedule,
    plan_traffic,
    verify_plan,
)
from longctx_patch.plans.generators.table import plan_for
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.layout import Layout, contiguous, striped, zigzag
from longctx_patch.sequence.masks import causal
from longctx_patch.transport import VirtualTransport, run_virtual_ranks
from tests.covering import covering
from tests.reference import dense_attention, relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
Place = Callable[[int, int], Layout]
BATCH, HEAD_DIM = 2, 8


class Case(NamedTuple):
    name: str
    layout: Layout
    forward: Plan
    backward: Plan


def all_cases(num_ranks: int, length: int, num_kv_heads: int) -> Iterator[Case]:
    """Every plan over every layout of consecutive or striped tokens that its generator can do."""

    def case(name: str, place: Place, groups: int = 1, per_node: int = 1) -> Case:
        layout, mask = place(length, num_ranks), causal(length)
        forward, backward = (
            make_schedule(
                plan_for(name, direction, "zigzag"),
                direction,
                layout,
                mask,
                num_kv_heads=groups,
                ranks_per_node=per_node,
            ).plan()
            for direction in Direction
        )
        return Case(f"{name} {place.__name__} {groups} {per_node}", layout, forward, backward)

    for place in (contiguous, zigzag, striped):
        for name in ("ring", "zigzag_direct", "burst"):
            yield case(name, place)
        for per_node in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
            yield case("double_ring", place, per_node=per_node)
        if place is not striped:
            for groups in {1, min(3, num_kv_heads), num_kv_heads}:
                yield case("allgather", place, groups)
    for name in ("distflash", "distflash_balanced"):
        yield case(name, contiguous)


def whole_inputs(length: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length * 100 + heads[0])
    shapes = [(BATCH, length, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def one_rank(
    transport: VirtualTransport, case: Case, inputs: list[Tensor]
) -> tuple[tuple[Tensor, ...], Traffic, Traffic]:
    executor = Executor(transport, transport, available()["torch_cpu"], Score(HEAD_DIM**-0.5))
    q, k, v, dout = (case.layout.shard(x, transport.group_rank, 1) for x in inputs)
    out, lse = executor.forward(case.forward, q, k, v)
    forward = Traffic(transport.counters.messages, transport.counters.bytes)
    grads = executor.backward(case.backward, dout, q, k, v, out, lse)
    total = Traffic(transport.counters.messages, transport.counters.bytes)
    backward = Traffic(total.messages - forward.messages, total.bytes - forward.bytes)
    return (out, lse, *grads), forward, backward


@pytest.mark.parametrize(
    ("num_ranks", "length", "heads", "dtype"),
    covering(
        [1, 2, 3, 4, 5, 8],
        [1, 7, 31, 64],
        [(4, 4), (8, 2), (16, 2), (4, 1)],
        [torch.float64, torch.float32],
    ),
    ids=str,
)
def test_every_plan_is_exact_and_sends_what_it_says(
    num_ranks: int, length: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    for case in all_cases(num_ranks, length, heads[1]):
        where = f"{case.name}, {heads}"
        verify_plan(case.forward)
        verify_plan(case.backward)
        inputs = whole_inputs(length, heads, dtype)
        ranks = run_virtual_ranks(num_ranks, partial(one_rank, case=case, inputs=inputs))
        for index, wanted in enumerate(dense_attention(*inputs)):
            shards = [tensors[index] for tensors, _, _ in ranks]
            found = case.layout.unshard(shards, 2 if index == 1 else 1)
            assert relative_error(found, wanted) < TOLERANCE[dtype], f"{where}: {index}"
        shape = AttentionShape(
            batch=BATCH,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=HEAD_DIM,
            itemsize_bytes=dtype.itemsize,
        )
        assert [sent for _, sent, _ in ranks] == list(plan_traffic(case.forward, shape)), where
        assert [sent for _, _, sent in ranks] == list(plan_traffic(case.backward, shape)), where


@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-24, 1e-30, 1e-37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_survives_tiny_gradients(size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 1, 64, 4, 32, generator=generator, dtype=torch.float64)
    dout = (dout * size).to(dtype)
    delta = (dout.double() * out).sum(-1)
    found = out_with_row_dots(dout, delta.float())
    assert relative_error((dout.double() * found.double()).sum(-1) / size, delta / size) < 0.01


def test_delta_in_place_of_out_is_as_accurate() -> None:
    """Kernels compute delta from out; the shortest out with that delta has no larger error."""
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 1, 2048, 4, 64, generator=generator)
    dout = dout.bfloat16()
    dout[:, 0] = 0  # a row without gradient has delta 0 whatever its out
    delta = (dout.double() * out.double()).sum(-1)
    found = row_dots(dout, out_with_row_dots(dout, delta.float()))
    rounded = row_dots(dout, out.bfloat16())
    assert torch.isfinite(found).all()
    assert (found - delta).norm() <= (rounded - delta).norm()
    in_float32 = row_dots(dout.float(), out_with_row_dots(dout.float(), delta.float()))
    assert relative_error(in_float32, delta) < 1e-6
