"""Fused layers in bfloat16: no further from float64 than twice what stock layers are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.hf.fused_layers import FusedLayersName, choose_fused_layers, fuse_layers
from tests.hf.tiny import gradients, tiny_model, token_rows
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTH = 301


@pytest.fixture(autouse=True)
def rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back after each test: Liger's stays in the modeling file."""
    for home in (modeling_llama, modeling_qwen3):
        monkeypatch.setattr(home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb)


def outcome(family: str, dtype: torch.dtype, how: FusedLayersName) -> tuple[Tensor, Tensor]:
    """(loss, all gradients in one) of weights that are bfloat16's, whatever they are kept in."""
    model: Any = tiny_model(family, dtype=torch.bfloat16).to(DEVICE)
    if dtype == torch.float64:
        wide: Any = tiny_model(family, dtype=dtype).to(DEVICE)
        wide.load_state_dict(model.state_dict())
        model = wide
    fuse_layers(model, how)
    fused = how != "none"
    handle = patch(model, LongContextConfig(checkpoint="attention" if fused else "none"))
    collate = SequenceShardCollator(handle.config, group_rank=0, pad_token_id=0)
    batch = {name: value.to(DEVICE) for name, value in collate(token_rows(LENGTH)).items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    handle.unpatch()
    return loss.detach(), torch.cat([grad.flatten() for grad in gradients(model).values()])


@pytest.mark.parametrize("how", ["liger", "compile"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_layers_are_as_accurate_as_stock_ones(family: str, how: FusedLayersName) -> None:
    if how == "liger":
        pytest.importorskip("liger_kernel")
        assert choose_fused_layers("auto", tiny_model(family), DEVICE).how == "liger"
    loss, grads = outcome(family, torch.float64, "none")
    stock_loss, stock_grads = outcome(family, torch.bfloat16, "none")
    fused_loss, fused_grads = outcome(family, torch.bfloat16, how)
    assert not torch.equal(fused_grads, stock_grads), "the layers are not fused"
    assert relative_error(fused_grads, grads) <= 2 * relative_error(stock_grads, grads)
    # One number may be right by luck, so the bound is never below 1e-3.
    assert relative_error(fused_loss, loss) <= max(2 * relative_error(stock_loss, loss), 1e-3)
