"""Accelerate shards each family by its layers under FSDP2, with one process's gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from longctx_patch import LongContextConfig, patch
from longctx_patch.hf.model.transformers_api import decoder_layers
from tests.hf.tiny import SUPPORTED, featured_model, gradients, precise_model
from tests.plugin.launched import fsdp2_on_cpu, run_launched, whole
from tests.reference import relative_error

NUM_RANKS, LENGTH, SEED = 2, 64, 3
# Text models that name blocks of encoders, experts, recurrent layers, layers that share weights,
# and latents, which are expanded while they travel.
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "mixtral", "zamba2", "deepseek_v3")

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
"""How far the loss and the worst gradient may be off. Recurrent families are in float64."""


def batch(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(model.config.vocab_size, (1, LENGTH), generator=torch.manual_seed(SEED))
    return {"input_ids": ids, "labels": ids}


def one_process(family: str) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of the stock model."""
    model = precise_model(family)
    loss = model(**batch(model), use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def errors_under_fsdp2(families: tuple[str, ...]) -> dict[str, tuple[float, torch.dtype, bool]]:
    """By family: the error of the loss or of the worst gradient, in which dtype, and whether each
    layer is sharded by itself whose kind shares no weights."""
    found = {}
    for family in families:
        wanted_loss, wanted = one_process(family)
        config = LongContextConfig(ring_degree=NUM_RANKS, checkpoint="attention")
        accelerator = fsdp2_on_cpu(config)
        model = precise_model(family)
        given = batch(model)
        handle = patch(model, config)
        layers = decoder_layers(handle.model)
        uses = Counter(parameter for layer in layers for parameter in layer.parameters())
        shared = {type(one) for one in layers if any(uses[p] > 1 for p in one.parameters())}
        alone = [layer for layer in layers if type(layer) not in shared]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = model(**given).loss
        accelerator.backward(loss)
        errors = [
            relative_error(whole(parameter.grad), wanted[name])
            for name, parameter in handle.model.named_parameters()
            if name in wanted
        ]
        assert len(errors) == len(wanted)
        by_layer = all(isinstance(layer, FSDPModule) for layer in alone)
        error = max(abs(loss.item() / wanted_loss - 1), *errors)
        found[family] = (error, model.dtype, by_layer)
        handle.unpatch()
        accelerator.free_memory()
    return found


def refused_dtypes() -> str:
    """What `prepare` says of a router in float32 among weights in bfloat16, as transformers reads
    DeepSeek-V3's."""
    accelerator = fsdp2_on_cpu(LongContextConfig(ring_degree=NUM_RANKS))
    model = featured_model("deepseek_v3").to(torch.bfloat16)
    for name, weight in model.named_parameters():
        weight.data = weight.float() if name.endswith("mlp.gate.weight") else weight.data
    with pytest.raises(ValueError, match="differ in dtype") as refused:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return str(refused.value)


def found_under_fsdp2(families: tuple[str, ...]) -> Any:
    return errors_under_fsdp2(families), refused_dtypes()


def test_layers_are_sharded_by_themselves_and_have_one_dtype() -> None:
    families = tuple(family for family in FAMILIES if family in SUPPORTED)
    for found, refused in run_launched(found_under_fsdp2, NUM_RANKS, families):
        assert found.keys() == set(families)
        for family, (error, dtype, by_layer) in found.items():
            assert by_layer, family
            assert error < BOUND[dtype], family
        assert "mlp.gate.weight in torch.float32" in refused
        assert "in torch.bfloat16" in refused
        assert "mixed_precision bf16" in refused
