"""What a model's attention layers see, in words."""

from collections import Counter
from typing import Any

from longctx_patch.hf.model.facts import ModelFacts
from longctx_patch.hf.model.supported import FAMILIES, SINKS


def describe_layers(model_config: Any) -> str:
    """Such as `12 layers of window 128, 12 layers causal, sinks`, for a supported family."""
    facts = ModelFacts.of(model_config)
    parts = [_part(count, window) for window, count in Counter(facts.windows).items()]
    if facts.softcap:
        parts.append(f"softcap {facts.softcap:g}")
    if SINKS in FAMILIES[model_config.model_type].features:
        parts.append("sinks")
    return ", ".join(parts)


def _part(count: int, window: int | None) -> str:
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"{layers} causal" if window is None else f"{layers} of window {window}"
