"""Which models can be patched, and the reasons why others can't."""

from collections.abc import Callable
from typing import Any

from torch import nn

from longctx_patch.config import LongContextConfig

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
}
"""transformers' model_type -> what people call it."""


class UnsupportedModelError(ValueError):
    """The model has something that sequence parallelism would silently get wrong."""


def check_model_config(model_config: Any, config: LongContextConfig) -> None:
    """Raise UnsupportedModelError with every reason, before anything is changed.

    Args:
        model_config: a transformers config; no weights are needed.
        config: the degrees to check it against.
    """
    model_type = getattr(model_config, "model_type", None)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: longctx-patch supports "
            f"{', '.join(FAMILIES)}. Other models mix tokens in ways that are not covered yet; "
            "train them without sequence parallelism."
        )
    reasons = [reason for check in _CHECKS if (reason := check(model_config, config))]
    if reasons:
        raise UnsupportedModelError(
            f"this {FAMILIES[model_type]} model can't be patched:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
        )


def check_modules(model: nn.Module, attention_modules: list[nn.Module]) -> None:
    """Check what a config does not show: adapters and values that modules have copied."""
    for name, peft_config in getattr(model, "peft_config", {}).items():
        if getattr(peft_config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"PEFT adapter {name!r} is {peft_config.peft_type}: it prepends virtual tokens on "
                "every rank, so positions would no longer match the shards. Use LoRA instead."
            )
        if getattr(peft_config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"PEFT adapter {name!r} is an aLoRA: it looks for its invocation tokens in the "
                "local shard, and ranks without them would switch it off. Use plain LoRA."
            )
    for module in attention_modules:
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(_BIDIRECTIONAL)
        if (dropout := getattr(module, "attention_dropout", 0.0)) > 0:
            raise UnsupportedModelError(_dropout_reason(dropout))
        if getattr(module, "sinks", None) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has attention sinks: not covered."
            )


def _window(model_config: Any, config: LongContextConfig) -> str | None:
    layer_types = getattr(model_config, "layer_types", None)
    window = getattr(model_config, "sliding_window", None)
    if layer_types is not None and model_config.model_type != "mistral":  # it reads no layer types
        active = [i for i, kind in enumerate(layer_types) if kind != "full_attention"]
        if not active:
            return None
        kinds = ", ".join(sorted({layer_types[i] for i in active}))
        where = f"{len(active)} of {len(layer_types)} layers are {kinds} (the first: {active[0]})"
    elif window is None or not getattr(model_config, "use_sliding_window", True):
        return None
    else:
        where = f"sliding_window={window} on every layer"
    return (
        f"{where}: sliding windows are not supported, and training them as full attention would be "
        "silently different. If you mean full attention, set sliding_window=None (and "
        "use_sliding_window=False, layer_types all 'full_attention') in config.json."
    )


def _bidirectional(model_config: Any, config: LongContextConfig) -> str | None:
    return _BIDIRECTIONAL if getattr(model_config, "is_causal", True) is False else None


_BIDIRECTIONAL = (
    "is_causal=False: attention here is causal over one document. Use a causal model, or train "
    "this one in one process."
)


def _softcap(model_config: Any, config: LongContextConfig) -> str | None:
    cap = getattr(model_config, "attn_logit_softcapping", None)
    if cap is None:
        return None
    return f"attn_logit_softcapping={cap}: no kernel here caps scores. Use a model without it."


def _sinks(model_config: Any, config: LongContextConfig) -> str | None:
    sinks = getattr(model_config, "attention_sinks", None) or getattr(model_config, "sinks", None)
    if not sinks:
        return None
    return f"attention sinks ({sinks}): a sink joins the softmax of every row and is not covered."


def _dropout(model_config: Any, config: LongContextConfig) -> str | None:
    dropout = getattr(model_config, "attention_dropout", 0.0) or 0.0
    return _dropout_reason(dropout) if dropout > 0 else None


def _dropout_reason(dropout: float) -> str:
    return (
        f"attention_dropout={dropout}: ranks would drop different entries of one attention matrix. "
        "Load the model with attention_dropout=0.0."
    )


def _rope(model_config: Any, config: LongContextConfig) -> str | None:
    rope = getattr(model_config, "rope_parameters", None) or {}
    per_layer = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    types = {str(r.get("rope_type")) for r in per_layer}
    moving = sorted(types & {"dynamic", "longrope"})
    if not moving or config.sequence_degree == 1:
        return None
    return (
        f"rope_type {', '.join(map(repr, moving))}: transformers takes its frequencies from the "
        "largest position that a process sees, so ranks would rotate by different angles. Use "
        "longctx_patch.hf.rope.scale_rope (--rope dynamic or yarn) on a config whose rope_type is "
        "'default'; it writes fixed frequencies."
    )


def _heads(model_config: Any, config: LongContextConfig) -> str | None:
    heads = model_config.num_attention_heads
    if config.ulysses_degree <= heads:
        return None
    return (
        f"ulysses_degree={config.ulysses_degree} exceeds its {heads} query heads: use "
        f"ulysses_degree <= {heads} and a larger ring_degree."
    )


_CHECKS: tuple[Callable[[Any, LongContextConfig], str | None], ...] = (
    _window,
    _bidirectional,
    _softcap,
    _sinks,
    _dropout,
    _rope,
    _heads,
)
