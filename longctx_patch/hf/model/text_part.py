"""The text model of a checkpoint that reads images or sound too: its config, its weights' names.

The text models are families of their own here. Those of Qwen2-VL to Qwen3-VL are Qwen2 and Qwen3:
the three rows of M-RoPE positions are equal where there is no image, which makes it ordinary RoPE.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Weight = TypeVar("Weight")

TEXT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3",
        "qwen3_vl_moe": "qwen3_moe",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
    }
)
"""Model type of a checkpoint -> that of its text model."""

_INNER, _HEAD = "model.language_model.", "lm_head."
"""Where the whole model, as transformers builds it, has its text model."""
_SAID_BY_CODE: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"qwen3_moe": {"norm_topk_prob": True}}
)
"""Options of a text model's config that the whole model has in its code."""
_MULTIMODAL_ROPE = frozenset({"mrope_section", "mrope_interleaved"})


def text_part(config: Any) -> Any:
    """The config of the text model in a checkpoint with this config, or `config` itself."""
    if getattr(config, "model_type", None) not in TEXT_TYPES:
        return config
    text = config.get_text_config()
    if text.model_type != TEXT_TYPES[config.model_type]:
        text = _as_type(text, TEXT_TYPES[config.model_type])
    # What a checkpoint says of all of it, it need not say of its text model.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    text.architectures = config.architectures
    if config.model_type == "gemma3":
        text.final_logit_softcapping = None  # which the whole model doesn't read
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text


def text_weights(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Those of the text model, by their names in it, of the weights of a whole model."""
    inner = {n.replace(_INNER, "model.", 1): w for n, w in weights.items() if n.startswith(_INNER)}
    return inner | {name: w for name, w in weights.items() if name.startswith(_HEAD)}


def _as_type(text: Any, model_type: str) -> Any:
    """The same config, as that of the family whose code computes the same on text."""
    from transformers import AutoConfig

    values = text.to_dict() | _SAID_BY_CODE.get(model_type, {})
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {n: v for n, v in rope.items() if n not in _MULTIMODAL_ROPE}
    del values["model_type"]
    if model_type == "qwen2":
        values.pop("head_dim", None)  # which Qwen2-VL doesn't read
    return AutoConfig.for_model(model_type, **values)
