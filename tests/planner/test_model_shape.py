"""Sizes from configs equal those of whole models on the meta device."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.family import CONVOLUTION
from longctx_patch.planner.model_shape import ExpertShape, shape_of
from longctx_patch.planner.named_models import NAMED
from tests.hf.tiny import SUPPORTED, featured_config, tiny_config
from tests.planner.jobs import llama_shape

FACTS = {name: ModelFacts.of(featured_config(name)) for name in SUPPORTED}
KNOWN = [name for name, facts in FACTS.items() if not facts.unpredicted]
OTHERS = [name for name, facts in FACTS.items() if facts.unpredicted]


def whole_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def assert_counts_are_of(config: Any, *targets: str) -> None:
    """`targets`: weights that the adapter names beside all linear layers."""
    model = whole_model(config)
    shape = shape_of(config, "some", lora_parameters=targets)
    layers = list(model.get_decoder().layers)
    assert shape.num_weights == sum(weight.numel() for weight in model.parameters())
    assert shape.num_layers == len(layers)
    for layer, counted in zip(layers, shape.layers, strict=True):
        assert counted.weights == sum(weight.numel() for weight in layer.parameters())
        linear = [part for part in layer.modules() if isinstance(part, torch.nn.Linear)]
        matrices = [part.weight for part in linear]
        if counted.experts is not None:  # experts and routers are no linear modules
            named = layer.named_parameters()
            matrices = [weight for name, weight in named if weight.ndim > 1 and "conv" not in name]
        assert counted.linear_weights == sum(weight.numel() for weight in matrices)
        assert (counted.recurrence is not None) == hasattr(layer, "linear_attn")
    assert shape.head_weights == model.get_output_embeddings().weight.numel()
    if all(kind.experts is None for kind in shape.kinds):
        linear = [
            part for each in layers for part in each.modules() if isinstance(part, torch.nn.Linear)
        ]
        assert shape.linear_sides == sum(part.in_features + part.out_features for part in linear)
        return
    adapter = LoraConfig(
        r=1, target_modules="all-linear", target_parameters=targets or None, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert shape.linear_sides == sum(weight.numel() for weight in trained)


@pytest.mark.parametrize("family", KNOWN)
def test_counts_are_those_of_the_model(family: str) -> None:
    both_kinds = FACTS[family].num_recurrent > 0  # it has layer_types of three layers
    few = {} if both_kinds else {"num_hidden_layers": 2}
    assert_counts_are_of(featured_config(family, **few))


@pytest.mark.parametrize(
    "targets", [("experts.gate_up_proj", "down_proj"), ("mlp.experts.down_proj",)]
)
def test_experts_that_an_adapter_names_count(targets: tuple[str, ...]) -> None:
    assert_counts_are_of(featured_config("qwen3_5_moe_text"), *targets)


def test_a_token_goes_through_some_experts() -> None:
    """Qwen3-30B-A3B: 3.0 billion active weights, with the head and without embeddings."""
    shape = shape_of(NAMED["Qwen/Qwen3-30B-A3B"].config(), "some")
    experts = shape.layers[0].experts
    assert experts == ExpertShape(num_experts=128, num_chosen=8, width=768)
    assert shape.num_weights == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_weights == pytest.approx(3.0e9, rel=0.02)
    of_experts = 48 * 8 * 3 * 2048 * 768
    in_attention = 48 * (2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048 + 128 * 2048)
    assert shape.active_weights == of_experts + in_attention + 151936 * 2048


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_count_once(tied: bool) -> None:
    assert_counts_are_of(tiny_config("qwen2", tie_word_embeddings=tied))


@pytest.mark.parametrize("family", OTHERS)
def test_what_was_never_measured_is_refused(family: str) -> None:
    """Experts, latents without experts, and recurrences that are no gated delta net."""
    facts = FACTS[family]
    kind = "short convolutions" if CONVOLUTION in SUPPORTED[family].features else "Mamba-2"
    wanted = f"layers of {kind} were never measured|layers that are alike"
    if facts.experts:
        wanted = r"num_.*=\d+.*dense layers, and experts of mixtral.*checkpoint='auto'"
    elif facts.latent:
        wanted = "kv_lora_rank=20.*not from a latent"
    with pytest.raises(ValueError, match=f"model some: .*({wanted})"):
        shape_of(featured_config(family), "some")


def test_norms_and_products_of_the_mlp_are_counted() -> None:
    def counted(family: str) -> tuple[int, bool, int]:
        shape = shape_of(featured_config(family), "some")
        layer = shape.layers[-1]
        return layer.num_norms, layer.has_head_norms, shape.num_mlp_products

    assert counted("llama") == (2, False, 3)
    assert counted("qwen3") == (2, True, 3)
    assert counted("gemma3_text") == (4, True, 3)
    assert counted("cohere2") == (1, False, 3)
    assert counted("phi3") == (2, False, 3)
    assert counted("starcoder2") == (2, False, 2)


def test_windows_are_counted() -> None:
    config = featured_config("gemma2")
    assert shape_of(config, "some").num_windowed_layers == 1
    assert len(config.layer_types) == 2  # the config isn't changed
    assert shape_of(featured_config("starcoder2"), "some").num_windowed_layers == 2


def test_flops_of_llama_8b_by_hand() -> None:
    shape = llama_shape()
    assert shape.num_weights == 8_030_261_248
    per_layer = 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
    linear = 32 * per_layer + 128256 * 4096
    # Per pair of tokens and hidden number: 4 FLOPs forward and 8 backward, halved by causality.
    attention = 32 * 6 * 1000**2 * 4096
    assert shape.step_flops(1000) == 6 * 1000 * linear + attention
