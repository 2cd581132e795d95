"""Published shapes of models, to be filled with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from longctx_patch.families.facts import ModelFacts
from longctx_patch.planner.model_shape import ModelShape, shape_of
from longctx_patch.planner.named_models import NAMED

_LLAMA_8B = dict(NAMED["meta-llama/Llama-3.1-8B"].sizes)
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _LLAMA_8B
        | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259},
        "llama-8b": _LLAMA_8B,
        "llama-70b": NAMED["meta-llama/Llama-3.1-70B"].sizes,
        "llama-8b-32k": _LLAMA_8B | {"vocab_size": 32000},
        "llama-1b": _LLAMA_8B
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"tie_word_embeddings": True},
        "smollm2-135m": NAMED["HuggingFaceTB/SmolLM2-135M"].sizes,
        "qwen2.5-0.5b": _LLAMA_8B
        | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
        | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"vocab_size": 151936, "tie_word_embeddings": True},
        "mistral-7b": NAMED["mistralai/Mistral-7B-v0.3"].sizes,
        "qwen2-7b": _LLAMA_8B
        | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"vocab_size": 152064},
        "qwen3-8b": NAMED["Qwen/Qwen3-8B"].sizes,
        "qwen3-30b-a3b": NAMED["Qwen/Qwen3-30B-A3B"].sizes,
        "qwen3.5-9b": NAMED["Qwen/Qwen3.5-9B"].sizes,
        "qwen3.5-35b-a3b": NAMED["Qwen/Qwen3.5-35B-A3B"].sizes,
        # Latent attention of 128 heads, with the dense MLPs of the first layers alone.
        "deepseek-v3-dense": {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "first_k_dense_replace": 61,
        },
    }
)


@dataclass(frozen=True)
class CountedShape:
    """What the scripts need of a model that the planner knows too little of, counted from its
    modules."""

    vocab_size: int
    num_layers: int
    active_weights: int
    """Weights of all matrix products, with the head."""
    attention_width: int
    """Numbers of a token's keys and values, for all heads and all layers that attend."""

    def step_flops(self, num_tokens: int) -> float:
        """As `ModelShape.step_flops`, without recurrences, which such models haven't."""
        attention = num_tokens**2 * self.attention_width
        return 6.0 * self.active_weights * num_tokens + 3.0 * attention


def model_config(name: str, num_layers: int | None, num_tokens: int) -> PreTrainedConfig:
    """The config of a published shape that reaches so many tokens; `num_layers` if not None."""
    settings = dict(MODELS[name])
    settings["num_hidden_layers"] = num_layers or settings["num_hidden_layers"]
    return AutoConfig.for_model(
        **settings,
        max_position_embeddings=num_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )


def model_shape(settings: Mapping[str, Any]) -> ModelShape:
    """Sizes of the shape named by the settings `model` and `num_layers`."""
    name = settings["model"]
    return shape_of(model_config(name, settings["num_layers"], 1), name)


def sizes_of(settings: Mapping[str, Any]) -> ModelShape | CountedShape:
    """The same, also where the planner knows too little of the model."""
    config = model_config(settings["model"], settings["num_layers"], 1)
    facts = ModelFacts.of(config)
    if not facts.unpredicted:
        return model_shape(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = model.get_decoder().layers
    linear = [part for part in layers.modules() if isinstance(part, nn.Linear)]
    head_dims = (
        config.qk_head_dim + config.v_head_dim if facts.latent is not None else 2 * facts.head_dim
    )
    assert not facts.num_recurrent, "count the FLOPs of its recurrences"
    return CountedShape(
        vocab_size=config.vocab_size,
        num_layers=len(layers),
        active_weights=sum(part.weight.numel() for part in linear)
        + config.vocab_size * config.hidden_size,
        attention_width=len(layers) * config.num_attention_heads * head_dims,
    )
