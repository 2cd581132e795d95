"""What a model's attention layers see, in words, from its config."""

from collections import Counter
from typing import Any

from longctx_patch.hf.model.supported import FAMILIES, SINKS


def describe_layers(model_config: Any) -> str:
    """Such as `12 layers of window 128, 12 layers causal, sinks`, for a supported family."""
    windows = Counter(windows_of(model_config)).items()
    parts = [_part(count, window) for window, count in windows]
    if softcap := getattr(model_config, "attn_logit_softcapping", None):
        parts.append(f"softcap {softcap:g}")
    if SINKS in FAMILIES[model_config.model_type].features:
        parts.append("sinks")
    return ", ".join(parts)


def _part(count: int, window: int | None) -> str:
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"{layers} causal" if window is None else f"{layers} of window {window}"


def windows_of(model_config: Any) -> list[int | None]:
    """Of each layer; a config without kinds of layers has one window for all, or none."""
    window = getattr(model_config, "sliding_window", None) or None
    kinds = getattr(model_config, "layer_types", None)
    if not kinds:
        return [window] * model_config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def windows_in(model_config: Any, num_tokens: int) -> list[int | None]:
    """Of each layer; None too where a row of so many tokens is no longer than it."""
    return [w if w and w < num_tokens else None for w in windows_of(model_config)]
