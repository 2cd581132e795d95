"""NCCL: every kind of mask in bfloat16, judged against float64.

Distribution must not cost accuracy: every error is at most twice that of the same kernel over the
whole sequence on one GPU.
"""

from collections.abc import Callable

import pytest
import torch

from longctx_patch import LongContextConfig, make_sequence_group
from tests.gpu.test_distributed import assert_as_accurate, on_gpu
from tests.harness import run_distributed
from tests.masked import masks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more"),
]

LENGTH = 1000
HEADS = (64, 16)
"""A sink's gradient is one number per head: the error of a few can be small by luck."""


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
        for masked in masks_of(LENGTH):
            # cuDNN builds a graph for every new shape, which is slow.
            kernels = ("torch_flash", "cudnn") if config is configs[0] else ("torch_flash",)
            for kernel in kernels:
                if masked.mask is None or not masked.mask.has_tiles:
                    case = on_gpu(config, masked, batch=1, sinks=True, heads=HEADS)
                    assert_as_accurate(group, alone, case, kernel)
        group.close()


def check_flex(rank: int, world_size: int) -> None:
    """FlexAttention under one config only: each kind of piece takes many seconds to compile."""
    alone = make_sequence_group(LongContextConfig())
    group = make_sequence_group(LongContextConfig(ring_degree=world_size, layout="contiguous"))
    for masked in masks_of(LENGTH):
        if masked.name in ("documents", "function"):
            case = on_gpu(group.config, masked, batch=1, sinks=True, heads=HEADS, softcap=2.0)
            assert_as_accurate(group, alone, case, "flex")
    group.close()


@pytest.mark.parametrize("checked", [check_masks, check_flex])
def test_masks_are_as_accurate_as_on_one_gpu(checked: Callable[[int, int], None]) -> None:
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    run_distributed(checked, world_size, world_size, backend="nccl", timeout_s=280)
