"""The text model of a checkpoint that reads images or sound too: its config, its weights' names.

The text models are families of their own here. Those of Qwen2-VL to Qwen3-VL are Qwen2 and Qwen3:
the three rows of M-RoPE positions are equal where there is no image, which makes it ordinary RoPE.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Weight = TypeVar("Weight")

TEXT_TYPES: Mapping[str, str | None] = MappingProxyType(
    {
        "llama4": "llama4_text",
        "mistral3": None,  # Mistral's, Ministral 3's
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
"""Model type of a checkpoint -> that of its text model; None: the one that its config names."""

_PLACES = (("model.language_model.", "model."), ("lm_head.", "lm_head."), ("language_model.", ""))
"""(beginning of a name in the whole model, as transformers builds it, that in its text model). The
whole model has its parts in an inner one and a head, or a text model with its own head."""
_SAID_BY_CODE: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"qwen3_moe": {"norm_topk_prob": True}}
)
"""Options of a text model's config that the whole model has in its code."""
HEAD_MAY_BE_UNSAID = frozenset({"mistral3"})
"""Whole models whose config.json may not say whether their head is tied to their embeddings, such
as Mistral Small 3.1's: transformers takes it for tied, until it finds two weights."""
_MULTIMODAL_ROPE = frozenset({"mrope_section", "mrope_interleaved"})


def text_part(config: Any) -> Any:
    """The config of the text model in a checkpoint with this config, or `config` itself."""
    if getattr(config, "model_type", None) not in TEXT_TYPES:
        return config
    text, wanted = config.get_text_config(), TEXT_TYPES[config.model_type]
    if wanted is not None and text.model_type != wanted:
        text = _as_type(text, wanted)
    # What a checkpoint says of all of it, it need not say of its text model.
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    text.architectures = config.architectures
    if config.model_type == "gemma3":
        text.final_logit_softcapping = None  # which the whole model doesn't read
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantised
    return text


def tie_as_text(config: Any, said: Mapping[str, Any]) -> None:
    """Have `config` say of its head what its text model's says, where its file says nothing.

    Args:
        config: of a whole model of `HEAD_MAY_BE_UNSAID`, changed in place.
        said: what its config.json holds.
    """
    if "tie_word_embeddings" not in said:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings


def text_weights(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Picks the text model's weights from a whole model's, by their names in the text model."""
    found = {}
    for name, weight in weights.items():
        ours = next(
            (new + name.removeprefix(old) for old, new in _PLACES if name.startswith(old)), ""
        )
        if ours:
            found[ours] = weight
    return found


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


_LISTED_WITH_IMAGES = frozenset({"mistral4"})
"""Families of text models that transformers does not make by AutoModelForCausalLM."""


def auto_class_name(config: Any) -> str:
    """The name of the class in transformers: whole models that read images have another one."""
    kinds = {*TEXT_TYPES, *_LISTED_WITH_IMAGES}
    return "AutoModelForImageTextToText" if config.model_type in kinds else "AutoModelForCausalLM"


def auto_class(config: Any) -> Any:
    """The class itself, for `from_config` and `from_pretrained`."""
    import transformers

    return getattr(transformers, auto_class_name(config))
