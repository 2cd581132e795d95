"""The small model that is verified has what the large one has, and all of it matters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from longctx_patch import LongContextConfig
from longctx_patch.hf.model.checks import FAMILIES, check_model_config
from longctx_patch.hf.model.transformers_api import checkpoint_layers
from longctx_patch.memory.run_layer import run_layer
from longctx_patch.verification.shrink import (
    HEAD_DIM,
    SOFTCAP,
    VOCAB_SIZE,
    WINDOW,
    build_small_model,
    shrink_config,
)
from tests.reference import relative_error

TOKENS = 127
WITHOUT_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
MATTERS = 1e-3
"""A hundred times the tolerance of a verification."""


def config_of(family: str, **changes: Any) -> Any:
    """As transformers' defaults have it, which are those of a published model."""
    drawn = WITHOUT_DROPOUT if family == "seed_oss" else {}
    return AutoConfig.for_model(family, **drawn | changes)


def ids() -> Tensor:
    return torch.randint(VOCAB_SIZE, (2, TOKENS), generator=torch.Generator().manual_seed(2))


def logits_of(small: Any) -> Tensor:
    model = build_small_model(copy.deepcopy(small), torch.float32)
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False).logits


def change(small: Any, **values: Any) -> Any:
    changed = copy.deepcopy(small)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shrinks_and_has_a_gradient_everywhere(family: str) -> None:
    large = config_of(family)
    before = large.to_dict()
    small = shrink_config(large)
    assert large.to_dict() == before
    check_model_config(small, LongContextConfig(ring_degree=4))
    assert small.num_hidden_layers == 2
    assert small.vocab_size == VOCAB_SIZE
    for name in ("model_type", "num_attention_heads", "num_key_value_heads", "rope_parameters"):
        assert getattr(small, name) == getattr(large, name)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps"):
        assert getattr(small, name, None) == getattr(large, name, None)
    model = build_small_model(small, torch.float32)
    assert model.config._attn_implementation == "eager"
    assert all(layer.self_attn.head_dim == HEAD_DIM for layer in model.model.layers)
    model(input_ids=ids(), use_cache=False).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.05 or parameter.numel() < 10, f"{name} is not drawn"
        assert parameter.grad is not None, f"{name} has no gradient"
        assert bool(parameter.grad.any()), f"{name} has no gradient"


LAYERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 1}, {"num_hidden_layers": 2}),
    ("gemma3_text", {}, {"layer_types": ["sliding_attention", "full_attention"]}),
    ("cohere2", {}, {"layer_types": ["sliding_attention", "full_attention"]}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW},
    ),
    ("smollm3", {}, {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 4096},
        {"no_rope_layers": [1, 0], "layer_types": ["full_attention", "sliding_attention"]},
    ),
    ("mistral", {"sliding_window": None}, {"sliding_window": None}),
    ("mistral", {"sliding_window": 5}, {"sliding_window": 5}),
    ("mixtral", {"num_experts_per_tok": 1}, {"num_local_experts": 4, "num_experts_per_tok": 1}),
    ("qwen2_moe", {}, {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}),
    (
        "qwen2_moe",
        {"decoder_sparse_step": 3},
        {"num_hidden_layers": 2, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
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
    ("gemma2", {}, {"attn_logit_softcapping": SOFTCAP, "final_logit_softcapping": 30.0}),
]


@pytest.mark.parametrize(("family", "changes", "wanted"), LAYERS)
def test_what_is_kept(family: str, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    small = shrink_config(config_of(family, **changes))
    assert {name: getattr(small, name) for name in wanted} == wanted
    assert torch.isfinite(logits_of(small)).all()


def test_the_window_matters() -> None:
    small = shrink_config(config_of("mistral"))
    assert small.sliding_window == WINDOW
    narrower, wider = (logits_of(change(small, sliding_window=w)) for w in (WINDOW - 1, WINDOW + 1))
    for other in (narrower, wider):
        assert relative_error(other, logits_of(small)) > MATTERS


def test_the_softcap_matters() -> None:
    small = shrink_config(config_of("gemma2"))
    without = logits_of(change(small, attn_logit_softcapping=None))
    assert relative_error(without, logits_of(small)) > MATTERS


def test_the_sinks_matter() -> None:
    model = build_small_model(shrink_config(config_of("gpt_oss")), torch.float32)
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits
        for layer in model.model.layers:
            assert bool((layer.self_attn.sinks != 0).all())
            layer.self_attn.sinks.fill_(0.0)
        assert relative_error(model(input_ids=ids(), use_cache=False).logits, logits) > MATTERS


class Roundings(TorchDispatchMode):
    """Where something that is float64 becomes float32."""

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


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_rounds_in_float64(family: str) -> None:
    model = build_small_model(shrink_config(config_of(family)), torch.float64)
    with Roundings() as roundings:
        logits = model(input_ids=ids(), use_cache=False).logits
    assert logits.dtype == torch.float64
    assert roundings.found == []


def test_nothing_rounds_in_float64_when_layers_are_recomputed() -> None:
    model = build_small_model(shrink_config(config_of("gemma2")), torch.float64)
    checkpoint_layers(model, lambda layer, forward, *args: run_layer("full", forward, *args))
    with Roundings() as roundings:
        model(input_ids=ids(), use_cache=False).logits.square().sum().backward()
    assert roundings.found == []
