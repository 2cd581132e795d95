"""`deterministic=True`: kernels get the flag or are refused, and two runs are bitwise equal."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, attention, run_virtual_ranks, virtual_group
from longctx_patch.kernels import (
    BackwardInputs,
    KernelRequest,
    Score,
    Segments,
    available,
    choose_kernel,
)
from longctx_patch.kernels.backends.flash_attn import FLASH_ATTN_2, FLASH_ATTN_4
from longctx_patch.kernels.backends.torch_flash import _deterministic_algorithms
from longctx_patch.kernels.base import CAUSAL_WINDOW
from longctx_patch.transport import VirtualTransport
from tests.kernels.dense import problem
from tests.kernels.fakes import Calls, flash_attn_2, flash_attn_4, loaded

GPU = KernelRequest("cuda", torch.bfloat16, 128, deterministic=True)


def test_auto_takes_none_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    choose_kernel.cache_clear()
    assert choose_kernel("auto", GPU._replace(deterministic=False)).name == "cudnn"
    chosen = choose_kernel("auto", GPU)
    assert chosen is available(deterministic=True)["torch_flash"]
    assert chosen is not available()["torch_flash"]
    with pytest.raises(
        ValueError,
        match="no kernel for bfloat16 with head dim 128, a deterministic backward on cuda:\n"
        "  cudnn: has no deterministic backward",
    ):
        choose_kernel("cudnn", GPU)


@pytest.mark.parametrize("asked", [False, True])
def test_packages_are_told(asked: bool) -> None:
    q, k, v, dout = problem(6, 6, (4, 2), torch.bfloat16)[:4]
    calls = Calls()
    packages = ((FLASH_ATTN_4, flash_attn_4(calls)), (FLASH_ATTN_2, flash_attn_2(calls)))
    for kernel, content in packages:
        kernel = replace(kernel, package=loaded(content), deterministic=asked)
        for lengths in ((6,), (4, 2)):
            segments = Segments(lengths, lengths, CAUSAL_WINDOW)
            out, lse = kernel.forward(q, k, v, segments, Score(0.3))
            kernel.backward(BackwardInputs(dout, q, k, v, out, lse), segments, Score(0.3))
    assert calls.deterministic == [asked] * 4


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_torch_is_told_for_the_op_alone(before: tuple[bool, bool]) -> None:
    def state() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with _deterministic_algorithms(wanted=True):
            assert state() == (True, False)
        assert state() == before
        with _deterministic_algorithms(wanted=False):
            assert state() == before
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(rank: VirtualTransport, config: LongContextConfig) -> tuple[Tensor, ...]:
    group = virtual_group(rank, config)
    q, k, v, dout = (x.float() for x in problem(203, 203, (4, 2), torch.bfloat16)[:4])
    layout = group.layout(203)
    q, k, v, dout = (layout.shard(x, group.group_rank, dim=1) for x in (q, k, v, dout))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    out, lse = attention(*leaves, group=group, num_tokens=203)
    return (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("kernel", ["torch_cpu", "torch_eager"])
def test_two_runs_are_bitwise_equal(kernel: str) -> None:
    config = LongContextConfig(
        ring_degree=2, ulysses_degree=2, plan="zigzag", kernel=kernel, deterministic=True
    )
    first, second = (run_virtual_ranks(4, partial(gradients, config=config)) for _ in range(2))
    for mine, again in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, again, strict=True))


def test_it_is_yes_or_no() -> None:
    with pytest.raises(ValueError, match="deterministic='yes': give True or False"):
        LongContextConfig(deterministic="yes")  # type: ignore[arg-type]
