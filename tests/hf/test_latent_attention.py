"""Latent attention (MLA) with adapters, on the stock path, and where its latents can't travel; that
ranks of every kind are exact is in `test_states_and_latents.py`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
)
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.family import LATENT
from longctx_patch.hf.model.transformers_api import attention_modules
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import (
    TOKENS,
    assert_exact,
    in_float64,
    packed_row,
    padded_rows,
)
from tests.hf.steps import on_ranks
from tests.hf.tiny import SUPPORTED, VOCABULARY, featured_model, tiny_model

LATENT_FAMILIES = [name for name, family in SUPPORTED.items() if LATENT in family.features]
PROJECTIONS = ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "o_proj"]


def adapted(family: str) -> Any:
    torch.manual_seed(3)
    lora = LoraConfig(target_modules=PROJECTIONS, r=3, init_lora_weights=False)
    model: Any = get_peft_model(in_float64(family), lora)
    keep_float64(model.get_base_model())
    return model


@pytest.mark.parametrize("family", LATENT_FAMILIES[:2])
def test_adapters_on_the_projections(family: str) -> None:
    config = LongContextConfig(ring_degree=3, checkpoint="attention")
    trained = assert_exact(adapted(family), config, packed_row())
    assert sum("kv_b_proj.lora_" in name for name in trained) == 4


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_the_head_size_is_the_larger_of_keys_and_values(family: str) -> None:
    model = featured_model(family)
    facts = ModelFacts.of(model.config)
    modules: list[Any] = attention_modules(model)
    assert modules
    for module in modules:
        keys, values = module.expand_kv(
            torch.zeros(1, 1, 2, module.kv_lora_rank),
            torch.zeros(1, 1, 2, module.qk_rope_head_dim),
        )
        assert keys.shape[3] != values.shape[3], "the tiny model would not show a mistake"
        assert facts.head_dim == max(keys.shape[3], values.shape[3])
        assert facts.num_kv_heads == keys.shape[1]


RING = LongContextConfig(ring_degree=2)


def lora(dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(target_modules=["kv_b_proj"], r=3, lora_dropout=dropout)


def travels(model: Any, handle: PatchHandle) -> str:
    model.train()
    model(**padded_rows())
    return repr(handle.first_step)


def test_the_stock_path_and_unpatch_give_the_stock_model() -> None:
    """Bitwise: attention gets latents there too, and expands them as the layer would."""
    model = featured_model("deepseek_v3").eval()
    ids = torch.randint(VOCABULARY, (2, TOKENS))
    with torch.no_grad():
        wanted = model(ids).logits
        words = model.generate(ids, max_new_tokens=3, do_sample=False)

    def then(_: Any, handle: PatchHandle) -> tuple[bool, ...]:
        with torch.no_grad():
            patched = handle.model(ids).logits
            said = handle.model.generate(ids, max_new_tokens=3, do_sample=False)
        handle.unpatch()
        with torch.no_grad():
            unpatched = handle.model(ids).logits
        layers = [layer.self_attn for layer in handle.model.model.layers]
        left = any("expand_kv" in vars(layer) for layer in layers)
        same = (torch.equal(patched, wanted), torch.equal(unpatched, wanted))
        return (*same, torch.equal(said, words), not left)

    assert all(map(all, on_ranks(model, RING, then)))


def test_dropout_in_the_expansion_lets_heads_travel() -> None:
    """It would be drawn anew for each block: `auto` leaves it to heads, `latent` is refused."""

    def adapted() -> Any:
        return get_peft_model(featured_model("youtu"), lora(dropout=0.5))

    assert all("latents" not in said for said in on_ranks(adapted(), RING, travels))
    asked = replace(RING, kv_exchange="latent")
    with pytest.raises(
        RuntimeError, match="kv_exchange='latent': an adapter on kv_b_proj has drop"
    ):
        on_ranks(adapted(), asked, lambda *_: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: get_peft_model(model, lora(dropout=0.5)), "set lora_dropout=0, or use kv_e"),
        (
            lambda model: model.model.layers[0].self_attn.kv_b_proj.weight.register_hook(id),
            "a hook on one of its weights would run for each block",
        ),
    ],
)
def test_what_the_expansion_gets_after_the_patch_is_checked(change: Any, says: str) -> None:
    def then(model: Any, handle: PatchHandle) -> None:
        change(handle.model)
        with pytest.raises(ValueError, match=says):
            handle.model(**padded_rows())

    on_ranks(featured_model("youtu"), RING, then)


def test_latents_that_can_not_travel_are_refused() -> None:
    for degrees, says in (
        ({"ulysses_degree": 2, "ring_degree": 2}, "exchanges heads"),
        ({}, "one rank passes nothing on"),
        ({"ring_degree": 2, "plan": "allgather"}, "plan='allgather'.*Take a ring's plan"),
    ):
        with pytest.raises(ValueError, match=f"kv_exchange='latent': .*{says}"):
            LongContextConfig(kv_exchange="latent", **degrees)
    with pytest.raises(ValueError, match="kv_exchange='latents'"):
        LongContextConfig(kv_exchange="latents")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="'llama' has no latents"):
        on_ranks(tiny_model(), LongContextConfig(ring_degree=2, kv_exchange="latent"), travels)


def test_auto_lets_heads_travel_where_they_are_fewer_numbers() -> None:
    wide = featured_model("youtu", kv_lora_rank=160)

    assert all("latents" not in said for said in on_ranks(wide, RING, travels))
