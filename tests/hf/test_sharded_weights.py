"""Weights that FSDP2 has sharded and gathers for forward and backward of a layer: two processes
against one with the stock model, for layers that use their weights in ways of their own."""

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longctx_patch import LongContextConfig, patch
from tests.harness import run_distributed
from tests.hf.float64 import backward, in_float64, padded_rows, stock_loss
from tests.reference import relative_error

CASES = {
    "deepseek_v3": (
        LongContextConfig(ring_degree=2, checkpoint="attention", kv_exchange="latent"),
        "latents travel",
    ),
    "qwen3_5_text": (
        LongContextConfig(ring_degree=2, checkpoint="full", layout="contiguous"),
        "recurrent",
    ),
}


def train_all(rank: int) -> dict[str, dict[str, Tensor]]:
    return {family: train_sharded(family) for family in CASES}


def train_sharded(family: str) -> dict[str, Tensor]:
    """The loss and every gradient."""
    config, says = CASES[family]
    model = in_float64(family)
    handle = patch(model, config)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    found = backward(model(**padded_rows()).loss, model)
    assert handle.first_step is not None
    assert handle.first_step.backward_problem() is None
    assert says in repr(handle.first_step)
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, Tensor]]]:
    return run_distributed(train_all, 2)


@pytest.mark.parametrize("family", CASES)
def test_weights_that_fsdp2_shards(family: str, by_rank: list[dict[str, Any]]) -> None:
    model = in_float64(family)
    wanted = backward(stock_loss(model, padded_rows()), model)
    for rank in by_rank:
        found = rank[family]
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert relative_error(found[name], value) < 1e-10, name
