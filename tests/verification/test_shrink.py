"""The small model that is verified has all features of the large one, and each matters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from longctx_patch import LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.run_layer import run_layer
from longctx_patch.verification.shrink import (
    HEAD_DIM,
    SOFTCAP,
    VOCAB_SIZE,
    WINDOW,
    build_small_model,
    shrink_config,
)
from tests.hf.tiny import ONE_OF_EACH, SUPPORTED
from tests.reference import relative_error

TOKENS = 127
PUBLISHED: dict[str, dict[str, Any]] = {
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8},
    "nemotron": {"num_key_value_heads": 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4},
    "phimoe": {"router_jitter_noise": 0.0},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
}
"""What published models have, or can be trained with, where transformers' default has no value."""
TRAINED_BY_THEIR_LOSS = ("phimoe",)


MATTERS = 1e-3
"""A change of logits that counts: a hundred times the tolerance of a verification."""
"""Families whose routers have a gradient of their own loss alone."""


def config_of(family: str, **changes: Any) -> Any:
    """The config of transformers' defaults, which are mostly those of a published model."""
    return AutoConfig.for_model(family, **PUBLISHED.get(family, {}) | changes)


def ids() -> Tensor:
    return torch.randint(VOCAB_SIZE, (2, TOKENS), generator=torch.Generator().manual_seed(2))


def logits_of(small: Any) -> Tensor:
    model = build_small_model(copy.deepcopy(small), torch.float32)
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False).logits


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_shrinks(family: str) -> None:
    large = config_of(family)
    before = large.to_dict()
    small = shrink_config(large)
    assert large.to_dict() == before
    check_model_config(small, LongContextConfig(ring_degree=4))
    kinds = set(getattr(large, "layer_types", None) or [])
    assert kinds == set(getattr(small, "layer_types", None) or [])
    assert small.num_hidden_layers == max(2, len(set(ModelFacts.of(large).layers)))
    assert small.vocab_size == VOCAB_SIZE
    for name in (
        *("model_type", "num_attention_heads", "num_key_value_heads", "rope_parameters"),
        *("tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps"),
    ):
        assert getattr(small, name, None) == getattr(large, name, None)
    facts = ModelFacts.of(small)
    assert facts.varied or facts.rotary_dim == HEAD_DIM
    assert facts.varied or facts.latent or facts.head_dim == HEAD_DIM


@pytest.mark.parametrize("family", SUPPORTED)
def test_weights_are_drawn_and_have_a_gradient(family: str) -> None:
    model = build_small_model(shrink_config(config_of(family)), torch.float32)
    assert model.config._attn_implementation == "eager"
    model(input_ids=ids()[:1], use_cache=False).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # biases of routers
            continue
        if family in TRAINED_BY_THEIR_LOSS and "router" in name:
            assert not parameter.grad.any()
            continue
        assert parameter.std() > 0.05 or parameter.numel() < 10, f"{name} is not drawn"
        assert parameter.grad is not None, f"{name} has no gradient"
        assert bool(parameter.grad.any()), f"{name} has no gradient"


LAYERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 1}, {"num_hidden_layers": 2}),
    ("cohere2", {}, {"layer_types": ["sliding_attention", "full_attention"]}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW},
    ),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 4096},
        {"no_rope_layers": [1, 0], "layer_types": ["full_attention", "sliding_attention"]},
    ),
    ("mistral", {"sliding_window": None}, {"sliding_window": None}),
    ("mixtral", {"num_experts_per_tok": 1}, {"num_local_experts": 4, "num_experts_per_tok": 1}),
    ("qwen2_moe", {}, {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}),
    (
        "qwen3_moe",
        {"mlp_only_layers": [3, 4]},
        {"num_hidden_layers": 2, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 4096, "mlp_only_layers": [0]},
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_only_layers": [0],
        },
    ),
    ("gemma2", {"head_dim": 128, "query_pre_attn_scalar": 144}, {"query_pre_attn_scalar": 9}),
    ("granite", {"head_dim": 128, "attention_multiplier": 0.0625}, {"attention_multiplier": 0.25}),
    (
        "deepseek_v3",
        {},
        {"qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 20, "first_k_dense_replace": 1},
    ),
    (
        "glm4_moe_lite",
        {},
        {"qk_nope_head_dim": 24, "v_head_dim": 32, "mlp_layer_types": ["dense", "sparse"]},
    ),
    ("gemma2", {}, {"attn_logit_softcapping": SOFTCAP, "final_logit_softcapping": 30.0}),
]


@pytest.mark.parametrize(("family", "changes", "wanted"), LAYERS)
def test_what_is_kept(family: str, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    small = shrink_config(config_of(family, **changes))
    assert {name: getattr(small, name) for name in wanted} == wanted
    assert torch.isfinite(logits_of(small)).all()


@pytest.mark.parametrize(
    ("family", "option", "other"),
    [
        ("mistral", "sliding_window", WINDOW - 1),
        ("mistral", "sliding_window", WINDOW + 1),
        ("gemma2", "attn_logit_softcapping", None),
    ],
)
def test_windows_and_softcaps_matter(family: str, option: str, other: int | None) -> None:
    small = shrink_config(config_of(family))
    logits = logits_of(small)
    setattr(small, option, other)
    assert relative_error(logits_of(small), logits) > MATTERS


def test_the_sinks_matter() -> None:
    model = build_small_model(shrink_config(config_of("gpt_oss")), torch.float32)
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits
        for layer in model.model.layers:
            assert bool((layer.self_attn.sinks != 0).all())
            layer.self_attn.sinks.fill_(0.0)
        assert relative_error(model(input_ids=ids(), use_cache=False).logits, logits) > MATTERS


class Roundings(TorchDispatchMode):
    """Records the operations that turn float64 into float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        if any(tensor.dtype == torch.float64 for tensor in tensors) and (
            isinstance(result, Tensor) and result.dtype == torch.float32
        ):
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_nothing_rounds_in_float64_also_when_layers_are_recomputed(family: str) -> None:
    model = build_small_model(shrink_config(config_of(family)), torch.float64)

    def run(_: int, forward: Any, *args: Any) -> Any:
        return run_layer("full", forward, *args)

    transformers_api.checkpoint_layers(model, run)
    with Roundings() as roundings:
        logits = model(input_ids=ids()[:1, :19], use_cache=False).logits
        logits.square().sum().backward()
    assert logits.dtype == torch.float64
    assert roundings.found == []
