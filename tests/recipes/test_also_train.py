"""Embeddings and norms that are trained beside an adapter: exact over ranks, tied where the model
ties them, in float32, saved and merged as PEFT does, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, verify_on_virtual_ranks
from longctx_patch.recipes import models
from longctx_patch.recipes.also_train import check_precision
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import backward, padded_rows, stock_loss
from tests.hf.tiny import featured_model, tiny_model
from tests.recipes.conftest import settings_of
from tests.reference import relative_error

CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "stablelm": {},  # norms of single heads, whose names are numbers
    "llama4_text": {},  # norms without weights
    "qwen3_5_text": {},  # norms of recurrent layers
}


def adapted(model: Any, *also_train: str, **more: Any) -> Any:
    asked = settings_of(dtype="float32", also_train=list(also_train), **more)
    return models.add_lora(model, asked, seed=0).train()


def copies(model: Any) -> dict[str, Tensor]:
    """Whole modules that are trained."""
    named = model.named_parameters()
    return {name: p for name, p in named if "modules_to_save" in name and p.requires_grad}


@pytest.mark.parametrize("family", CASES)
def test_gradients_are_those_of_one_process_and_of_the_base(family: str) -> None:
    """In float64; the adapter starts with a product of 0, so that the base's gradients are its."""

    def base() -> Any:
        return featured_model(family, **CASES[family])

    stock = base()
    keep_float64(stock)
    wanted = backward(stock_loss(stock, padded_rows()), stock)
    model = adapted(base(), "embeddings,norms")
    assert all(parameter.dtype == torch.float32 for parameter in copies(model).values())
    for parameter in model.parameters():  # not buffers: rotary embeddings compute in float32
        parameter.data = parameter.data.double()
    for ulysses in (1, 2) if family == "llama" else (1,):
        config = LongContextConfig(ulysses_degree=ulysses, ring_degree=2)
        found = verify_on_virtual_ranks(model, config, padded_rows())
        assert max(found.grad_rel_errs.values()) < 1e-10, str(found)
        assert copies(model).keys() <= found.grad_rel_errs.keys()
    keep_float64(model.get_base_model())
    mine = backward(stock_loss(model, padded_rows()), model)
    for name in copies(model):
        own = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
        assert relative_error(mine[name], wanted.pop(own)) < 1e-10, name
    assert not [name for name in wanted if "embed_tokens.w" in name or "norm" in name]


def test_weights_of_16_bits_get_copies_in_float32_and_need_mixed_precision() -> None:
    model = adapted(tiny_model(dtype=torch.bfloat16, tie_word_embeddings=True), "embeddings")
    (copy,) = copies(model).values()
    assert (copy.dtype, model.get_output_embeddings().weight) == (torch.float32, copy)
    frozen = model.get_base_model().model.norm.weight
    assert (frozen.dtype, frozen.requires_grad) == (torch.bfloat16, False)
    for dtype, mixed, also_train in (
        ("float32", "no", ["norms"]),
        ("bfloat16", "bf16", ["norms"]),
        ("bfloat16", "no", []),
    ):
        check_precision(also_train, dtype, mixed)
    with pytest.raises(ValueError, match=r"also_train=norms with dtype=bfloat16 .*Use dtype: flo"):
        check_precision(["norms"], "bfloat16", "no")


def test_what_can_not_be_trained_beside_an_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norms: those of a olmo model have no weights"):
        adapted(tiny_model("olmo"), "norms")
    with pytest.raises(ValueError, match=r"gpt_neox model shares .*Leave `embeddings` out"):
        adapted(tiny_model("gpt_neox", tie_word_embeddings=True), "embeddings")
    with pytest.raises(ValueError, match=r"lora_targets lm_head with also_train=embeddings"):
        adapted(tiny_model(tie_word_embeddings=True), "embeddings", lora_targets=["lm_head"])
