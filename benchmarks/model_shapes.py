"""Published shapes of models, to be filled with random weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from longctx_patch.predict.run.shape import ModelShape, shape_of

_LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _LLAMA_8B
        | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259},
        "llama-8b": _LLAMA_8B,
        "llama-70b": _LLAMA_8B
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64},
        "llama-8b-32k": _LLAMA_8B | {"vocab_size": 32000},
        "llama-1b": _LLAMA_8B
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"tie_word_embeddings": True},
        "mistral-7b": _LLAMA_8B
        | {"model_type": "mistral", "vocab_size": 32768}
        | {"sliding_window": None},
        "qwen2-7b": _LLAMA_8B
        | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"vocab_size": 152064},
        "qwen3-8b": _LLAMA_8B
        | {"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"head_dim": 128, "vocab_size": 151936},
    }
)


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
