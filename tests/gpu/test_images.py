"""Models that read images, in bfloat16 with the kernels of attention: errors of every gradient
against float64 are at most twice those of the stock model on one GPU, as means over batches."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, make_sequence_group, patch
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.verification.shrink import keep_float64
from tests.gpu.test_recurrent import assert_as_accurate, mean_errors
from tests.harness import run_distributed
from tests.hf.float64 import backward, stock_loss
from tests.hf.seeing import pictured_rows, seeing_model, seen_together
from tests.hf.tiny import gradients, mean_over_ranks
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

NUM_BATCHES = 4
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
WIDE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"head_dim": 64, "hidden_size": 256, "rope_parameters": MROPE},
    "qwen3_vl": {"head_dim": 64, "rope_parameters": MROPE},
    "gemma3": {"head_dim": 64},
}
"""Heads that kernels take; Qwen2.5's are a part of the hidden size."""


def model_of(family: str) -> Any:
    text = WIDE[family]
    vision = {"out_hidden_size": text["hidden_size"]} if "hidden_size" in text else {}
    return seeing_model(family, vision=vision, **text)


def batch_of(family: str, seed: int) -> dict[str, Tensor]:
    """Gemma 3's has one row, since its images are in other places in each."""
    return seen_together(family, pictured_rows(family, 1 if family == "gemma3" else 3, seed))


def moved(batch: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {n: v.to(device, dtype if v.is_floating_point() else None) for n, v in batch.items()}


def exact_step(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    keep_float64(model)
    batch = moved(batch, torch.float64, "cpu")
    return backward(stock_loss(model, batch), model)


def sharded_step(
    model: Any, config: LongContextConfig, group: SequenceGroup, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    handle = patch(model, config, group=group)
    loss = model(**batch).loss
    loss.backward()
    handle.unpatch()
    found = {"loss": loss.detach()} | gradients(model)
    return {name: mean_over_ranks(value.double()) for name, value in found.items()}


def compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {name: relative_error(found[name].cpu(), value) for name, value in wanted.items()}


def check_family(rank: int, world_size: int, family: str) -> None:
    model = model_of(family)
    ways = (
        LongContextConfig(ring_degree=world_size, checkpoint="attention"),
        LongContextConfig(ulysses_degree=world_size),
    )
    groups = [make_sequence_group(way) for way in ways]  # each takes memory, and stays
    own: list[dict[str, float]] = []
    found: list[list[dict[str, float]]] = [[] for _ in ways]
    for seed in range(NUM_BATCHES):
        batch = batch_of(family, seed)
        wanted = exact_step(model, batch)
        on_gpu = copy.deepcopy(model).to("cuda", torch.bfloat16)
        batch = moved(batch, torch.bfloat16, "cuda")
        stock = copy.deepcopy(on_gpu)
        own.append(compared(backward(stock(**batch).loss, stock), wanted))
        for way, group, errors in zip(ways, groups, found, strict=True):
            step = sharded_step(copy.deepcopy(on_gpu), way, group, batch)
            errors.append(compared(step, wanted))
    for way, errors in zip(ways, found, strict=True):
        assert_as_accurate(mean_errors(errors), mean_errors(own), (family, way))


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_images_are_as_accurate_as_in_the_stock_model(num_ranks: int, family: str) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    run_distributed(check_family, num_ranks, num_ranks, family, backend="nccl", timeout_s=200)
