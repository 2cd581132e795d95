"""NCCL: every kind of mask in bfloat16, judged against float64.

Distribution may not cost accuracy: every error is at most twice that of the same kernel over the
whole sequence on one GPU.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch import LongContextConfig, attention, make_sequence_group
from longctx_patch.engine.groups import SequenceGroup
from tests.gpu.test_distributed import gather
from tests.harness import run_distributed
from tests.masked import Masked, dense_masked, masks_of
from tests.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more"),
]

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 8, 2, 64, 1000


def inputs() -> list[Tensor]:
    """q, k, v, dout and sinks, whose gradient is a sum over ranks and so in float32."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, LENGTH, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]
    return [*tensors, torch.randn(HEADS, generator=generator, device="cuda")]


def run_attention(group: SequenceGroup, case: Masked, softcap: float | None) -> dict[str, Tensor]:
    """Whole results, put together from all ranks."""
    *whole, sinks = inputs()
    layout = group.layout(case.documents)
    q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, _ = attention(
        q,
        k,
        v,
        group=group,
        documents=case.documents,
        window=case.window,
        mask=case.mask,
        sinks=sinks,
        softcap=softcap,
    )
    dq, dk, dv, dsinks = torch.autograd.grad(out, leaves, dout)
    found = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    if group.num_ranks > 1:
        dist.all_reduce(dsinks)
        found = {name: layout.unshard(gather(x, layout.sizes), 1) for name, x in found.items()}
    return found | {"dsinks": dsinks}


def check_masks(rank: int, world_size: int) -> None:
    alone = make_sequence_group(LongContextConfig())
    plans = ("halo", "ring", "zigzag_direct", "distflash_balanced", "allgather", "burst")
    configs = [
        LongContextConfig(ring_degree=world_size),
        LongContextConfig(ulysses_degree=world_size),
        LongContextConfig(ulysses_degree=2, ring_degree=world_size // 2),
        *(LongContextConfig(ring_degree=world_size, plan=plan) for plan in plans),
    ]
    for config in configs:
        group = make_sequence_group(config)
        for case in masks_of(LENGTH):
            # cuDNN makes a graph for every new shape, which takes long.
            kernels = ("torch_flash", "cudnn") if config is configs[0] else ("torch_flash",)
            for kernel in kernels:
                if case.mask is None or not case.mask.has_tiles:
                    check(group, alone, case, kernel, softcap=None)
        group.close()


def check_flex(rank: int, world_size: int) -> None:
    """Each kind of piece is compiled for many seconds, so there is one config."""
    alone = make_sequence_group(LongContextConfig())
    group = make_sequence_group(LongContextConfig(ring_degree=world_size, layout="contiguous"))
    for case in masks_of(LENGTH):
        if case.name in ("documents", "function"):
            check(group, alone, case, "flex", softcap=2.0)
    group.close()


def check(
    group: SequenceGroup, alone: SequenceGroup, case: Masked, kernel: str, softcap: float | None
) -> None:
    q, k, v, dout, sinks = inputs()
    wanted = dense_masked(q, k, v, dout, case.table, sinks, softcap)
    plain, found = (
        run_attention(replace(g, config=replace(g.config, kernel=kernel)), case, softcap)
        for g in (alone, group)
    )
    for name, part in found.items():
        bound = 2 * relative_error(plain[name], wanted[name])
        error = relative_error(part, wanted[name])
        assert error <= bound, (name, case.name, kernel, group.config, error, bound)


@pytest.mark.parametrize("checked", [check_masks, check_flex])
def test_masks_are_as_accurate_as_on_one_gpu(checked: Callable[[int, int], None]) -> None:
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    run_distributed(checked, world_size, world_size, backend="nccl", timeout_s=280)
