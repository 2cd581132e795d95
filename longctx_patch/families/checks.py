"""Refuses models that are not in the table of support, or have options that would go wrong.

Importing this needs neither torch nor transformers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from longctx_patch.families.facts import (
    CHUNKED,
    FULL,
    WINDOWED,
    ModelFacts,
    layer_kinds,
    text_config,
)
from longctx_patch.families.family import IMAGES, RECURRENT, SINKS, SOFTCAP, Family
from longctx_patch.families.rope_facts import follows_length, ropes_of
from longctx_patch.families.supported import FAMILIES, refusal_of
from longctx_patch.plans.head_split import halves

if TYPE_CHECKING:
    from torch import nn

    from longctx_patch.config import LongContextConfig

EXACT_ADAPTERS = frozenset(
    {
        *("BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA"),
        *("HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT"),
        *("PSOFT", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS"),
        *("UNILORA", "VBLORA", "VERA", "WAVEFT"),
    }
)
"""PEFT's types of adapters that tests/families/test_adapters.py compares with one process."""
INEXACT_LORA: Mapping[str, str] = MappingProxyType(
    {
        "alora_invocation_tokens": "looks for these tokens in a rank's share of a row",
        "arrow_config": "is not compared with one process",
        "layer_replication": "copies layers with their config, so that they keep stock attention",
        "monteclora_config": "draws random numbers, which would differ between ranks",
        "velora_config": "takes averages over the tokens of a batch, of which a rank has a share",
    }
)
"""Options of LoRA that change what it computes with: option -> why it is refused."""


class UnsupportedModelError(ValueError):
    """The model has something that sequence parallelism would silently get wrong."""


def check_model_config(model_config: Any, config: "LongContextConfig") -> None:
    """Raise UnsupportedModelError with every reason, before anything is changed.

    Args:
        model_config: a transformers config; no weights are needed.
        config: the degrees to check it against.
    """
    model_type = str(getattr(model_config, "model_type", None))
    if (refusal := refusal_of(model_type)) is not None:
        layer = _uncovered_layer(None, model_config)
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: {refusal}"
            + (f" ({layer})" if layer else "")
            + ". `longctx families` prints what is supported; train this one without sequence "
            "parallelism."
        )
    family, text = FAMILIES[model_type], text_config(model_config)
    reasons = [reason for check in _CHECKS if (reason := check(family, text, config))]
    if IMAGES in family.features and (noise := _noise(family, model_config.vision_config, config)):
        reasons.append(f"in its vision_config, {noise}")
    if reasons:
        raise UnsupportedModelError(
            f"this {family.name} model can't be patched:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
        )


def check_modules(model: "nn.Module", attention_modules: "list[nn.Module]") -> None:
    """Check what a config does not show: adapters and values that modules have copied."""
    if (adapter := adapter_problem(model)) is not None:
        raise UnsupportedModelError(adapter)
    for module in attention_modules:
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(_bidirectional_reason("is_causal=False"))
        dropout = getattr(module, "attention_dropout", 0.0)
        dropout = getattr(dropout, "p", dropout)  # a module in Persimmon
        if dropout > 0:
            raise UnsupportedModelError(_noise_reason(f"attention_dropout={dropout}"))


def adapter_problem(model: "nn.Module") -> str | None:
    """Says what makes an adapter of a PEFT model, or of the model in it, inexact over ranks."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if kind not in EXACT_ADAPTERS:
            return (
                f"PEFT adapter {name!r} is {kind}, which is not shown to be exact: adapters that "
                "add tokens, mix them, or draw random numbers compute something else on a rank's "
                f"share of a row. Use LORA, or one of {', '.join(sorted(EXACT_ADAPTERS))}."
            )
        for option, why in INEXACT_LORA.items():
            if (value := getattr(adapter, option, None)) is not None:
                return f"PEFT adapter {name!r} has {option}={value}: it {why}. Use LoRA without it."
    return None


def _uncovered_layer(family: Family | None, model_config: Any) -> str | None:
    kinds = enumerate(layer_kinds(model_config))
    covered = {FULL, WINDOWED} | (frozenset() if family is None else family.layers)
    return next((f"layer {i} is {kind}" for i, kind in kinds if kind not in covered), None)


def _layer_types(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    layer = _uncovered_layer(family, model_config)
    if layer is None:
        return None
    covered = " or ".join(sorted(family.layers))
    return (
        f"{layer}: layers here attend fully or through a sliding window"
        f"{f', or are {covered}' * bool(covered)}. Use a model with full_attention and "
        "sliding_attention layers only."
    )


def _window(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    kinds, window = layer_kinds(model_config), getattr(model_config, "sliding_window", None)
    if WINDOWED not in kinds or (isinstance(window, int) and window > 0):
        return None
    return (
        f"layer {kinds.index(WINDOWED)} is sliding_attention, but sliding_window="
        f"{window}: a window holds one token or more, its own included. Set sliding_window (and "
        "use_sliding_window=True where there is one), or make the layers full_attention."
    )


def _chunk(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    kinds, chunk = layer_kinds(model_config), getattr(model_config, "attention_chunk_size", None)
    is_covered = CHUNKED in family.layers
    if CHUNKED not in kinds or not is_covered or (isinstance(chunk, int) and chunk > 0):
        return None
    return (
        f"layer {kinds.index(CHUNKED)} is chunked_attention, but attention_chunk_size={chunk}: a "
        "chunk has one token or more. Set attention_chunk_size, or make the layers full_attention."
    )


def _unread_options(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    """An option that the config sets, but transformers' code of this family ignores."""
    features = family.features
    options = {"attn_logit_softcapping": SOFTCAP, "attention_sinks": SINKS, "sinks": SINKS}
    for option, feature in options.items():
        value = getattr(model_config, option, None)
        if value and feature not in features:
            return (
                f"{option}={value}: transformers has no {feature} for this family, so "
                "training would differ from the model's own code. Remove it from config.json."
            )
    return None


def _bidirectional(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    if getattr(model_config, "is_causal", True) is False:
        return _bidirectional_reason("is_causal=False")
    both_ways = getattr(model_config, "use_bidirectional_attention", None)
    if both_ways and both_ways != "vision":  # that is for images, which a text model has none of
        return _bidirectional_reason("use_bidirectional_attention=True")
    return None


def _bidirectional_reason(option: str) -> str:
    return (
        f"{option}: this model attends to later tokens by rules of its own. Use a causal "
        "model; for attention both ways give patch() the mask=longctx_patch.masks.bidirectional."
    )


def _noise(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    """Dropout and jitter, whatever a family calls them, but for those of other heads."""
    drawn = [
        f"{name}={value}"
        for name, value in vars(model_config).items()
        if name.endswith(("dropout", "_pdrop", "jitter", "jitter_noise"))
        and not name.startswith(("classifier_", "summary_"))
        and isinstance(value, int | float)
        and value > 0
    ]
    return _noise_reason(", ".join(drawn)) if drawn else None


def _noise_reason(drawn: str) -> str:
    zeros = ", ".join(f"{option.split('=')[0]}=0.0" for option in drawn.split(", "))
    return (
        f"{drawn}: ranks would draw other random numbers than one process, and for attention "
        f"different ones within one row. Load the model with {zeros}."
    )


def _rope(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    moving = sorted({r["rope_type"] for r in ropes_of(model_config) if follows_length(r)})
    if not moving or config.sequence_degree == 1:
        return None
    return (
        f"rope_type {', '.join(map(repr, moving))}: transformers takes its frequencies from the "
        "largest position that a process sees, so ranks would rotate by different angles. Freeze "
        f"them at your length: --rope {moving[0]}, which is longctx_patch.scale_rope(config, "
        f"kind={moving[0]!r}, target_length=...)."
    )


def _heads(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    heads = ModelFacts.of(model_config).num_heads
    if config.ulysses_degree <= heads:
        return None
    return (
        f"ulysses_degree={config.ulysses_degree} exceeds its {heads} query heads: use "
        f"ulysses_degree <= {heads} and a larger ring_degree."
    )


def _mlp_tiles(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    tiles, facts = config.mlp_tiles, ModelFacts.of(model_config)
    if tiles in (None, 1) or any(layer.is_dense for layer in facts.layers):
        return None
    which = "all its layers have experts" if facts.experts else "its layers share their MLPs"
    return f"mlp_tiles={tiles}: {which}, which stay whole. Use mlp_tiles=None or mlp_tiles=1."


def _placement(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    """A striped placement under recurrent layers."""
    recurrent = [f for f in family.features if f in RECURRENT]
    placed = {config.placement, config.packed_placement}
    if not recurrent or config.ring_degree == 1 or "striped" not in placed:
        return None
    return (
        f"layout='striped' with {recurrent[0]}: each token would be on another rank than the one "
        "before it, so that its state would travel for every token. Use layout='contiguous' or "
        "'zigzag' (which attention_kept below 1 then needs to be given)."
    )


def _shifted_group(family: Family, model_config: Any, config: "LongContextConfig") -> str | None:
    """Models without layers whose attention would be cut into groups, or heads to halve."""
    if not (group := config.shifted_group):
        return None
    facts, leave_out = ModelFacts.of(model_config), "Leave it out (0): layers attend fully then."
    others = [f for f in family.features if f in RECURRENT or f == IMAGES]
    if others or facts.latent:
        what = others[0] if others else "latent attention"
        return f"shifted_group={group} with {what}: it is for attention over heads. {leave_out}"
    if all(reach.is_local for reach in facts.reaches):
        return f"shifted_group={group}: no layer has full attention. {leave_out}"
    least = min(q.stop - q.start for q, _ in halves(facts.num_heads, facts.num_kv_heads))
    if least < config.ulysses_degree:
        return (
            f"shifted_group={group} with ulysses_degree={config.ulysses_degree}: the smaller half "
            f"of its {facts.num_heads} query heads has {least}, and each rank needs one. Use "
            f"ulysses_degree <= {max(least, 1)} and a larger ring_degree, or shifted_group=0."
        )
    return None


_CHECKS: tuple[Callable[[Family, Any, "LongContextConfig"], str | None], ...] = (
    _layer_types,
    _window,
    _chunk,
    _unread_options,
    _bidirectional,
    _noise,
    _rope,
    _heads,
    _shifted_group,
    _mlp_tiles,
    _placement,
)
