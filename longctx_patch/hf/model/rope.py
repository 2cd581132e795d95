"""RoPE scaling for long contexts, written into a copy of a transformers config.

Every kind of scaling becomes a fixed set of frequencies. That matters for sequence parallelism:
transformers' own "dynamic" type recomputes its frequencies in each forward from the largest
position that the process sees (`modeling_rope_utils.dynamic_rope_update`: `seq_len =
position_ids.max() + 1`), so ranks holding different parts of one sequence would rotate by different
angles, silently. `scale_rope` therefore freezes "dynamic" at the target length, where it is an
ordinary RoPE with a larger base.
"""

import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

from longctx_patch.hf.model.facts import ModelFacts, text_config
from longctx_patch.rules.names import require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RopeKind = Literal["none", "linear", "dynamic", "yarn"]
WITHOUT_POSITIONS = frozenset({"kimi_linear", "nemotron_h"})
"""Model types whose attention sees no positions, since their recurrent layers do."""
LONGROPE_ALONE = frozenset({"phi3", "phimoe"})
"""Model types whose config transformers reads with no scaling but longrope, or not at all."""


def scale_rope(
    model_config: "PreTrainedConfig",
    *,
    kind: RopeKind,
    target_length: int,
    factor: float | None = None,
) -> "PreTrainedConfig":
    """Return a copy of `model_config` whose RoPE reaches `target_length`; the given one is kept.

    With M the model's present length (`max_position_embeddings`) and L the target:

    * `linear`: all frequencies divided by `factor` (default L / M).
    * `yarn`: `factor` (default L / M) with `original_max_position_embeddings` M
      (https://huggingface.co/papers/2309.00071).
    * `dynamic`: transformers' dynamic NTK at length L with `factor` f (default 1), frozen: default
      RoPE with `rope_theta * (f * L / M - (f - 1)) ** (d / (d - 2))`, d being the rotary dim.
      f = 1 stretches the slowest wave by exactly L / M.
      A model whose RoPE is of that type already is frozen at L, or at M if that is longer, with
      the factor it has.
    * `none`: nothing changes; L must be within what the model has. Models whose
      attention sees no positions (Nemotron-H, Kimi Linear) have no such limit.

    `max_position_embeddings` becomes L (or `factor * M` where a larger factor was asked for).
    A config that already carries this kind and reaches L comes back unchanged.

    Raises ValueError for a model without RoPE, RoPE per layer type that would be scaled, RoPE
    already scaled by another kind, a target that needs scaling (`none`) or does not (the others),
    a kind that no config of the model's type may have, or too small a factor.

    >>> from transformers import LlamaConfig
    >>> scale_rope(LlamaConfig(), kind="yarn", target_length=8192).rope_parameters["factor"]
    4.0
    """
    _check_arguments(kind, target_length, factor)
    if kind == "none" and reachable_length(model_config) is None:
        return _without_positions(model_config, target_length)
    rope = _current_rope(model_config, kind)
    if kind == "none" and rope["rope_type"] == "dynamic":
        raise ValueError(
            "the model's RoPE is of type 'dynamic': its frequencies depend on the largest position "
            "that each process sees, so ranks would disagree. Use rope kind 'dynamic' (--rope "
            "dynamic), which freezes it at the target length."
        )
    if kind == rope["rope_type"] == "dynamic":
        return _frozen_dynamic(model_config, rope, target_length, factor or rope["factor"])
    if target_length <= _declared_length(model_config):
        _refuse_unneeded(model_config, rope, kind, target_length)
        return copy.deepcopy(model_config)
    _refuse_unreachable(model_config, rope, kind, target_length, factor)
    if kind == "dynamic":
        return _frozen_dynamic(model_config, rope, target_length, factor or 1.0)
    if model_config.model_type in LONGROPE_ALONE:
        raise ValueError(
            f"rope kind {kind!r} with model type {model_config.model_type!r}: transformers reads "
            "no scaling in its config but longrope, so nobody could load what is written. Use kind "
            "'dynamic' (--rope dynamic)."
        )
    scaled = copy.deepcopy(model_config)
    original_length = model_config.max_position_embeddings
    needed = target_length / original_length
    used = float(factor or needed)
    scaled.rope_parameters = {**rope, "rope_type": kind, "factor": used}
    if kind == "yarn":
        scaled.rope_parameters["original_max_position_embeddings"] = original_length
    scaled.max_position_embeddings = max(target_length, round(used * original_length))
    return scaled


def _without_positions(model_config: "PreTrainedConfig", target_length: int) -> "PreTrainedConfig":
    """A config that reaches any length, so that only a stated one is in the way."""
    found = copy.deepcopy(model_config)
    stated = getattr(model_config, "max_position_embeddings", None)
    if stated:
        found.max_position_embeddings = max(stated, target_length)
    return found


def reachable_length(model_config: "PreTrainedConfig") -> int | None:
    """The longest document, in tokens, that the config declares, its own scaling included.

    None: any. That is so where attention sees no positions, and where every layer has a window or
    chunks: rotations depend on distances alone, which then stay below it.
    """
    config = text_config(model_config)
    # Granite 4's says "nope" where its attention layers see no positions.
    is_blind = getattr(config, "position_embedding_type", "rope") != "rope"
    if is_blind or config.model_type in WITHOUT_POSITIONS:
        return None
    if not getattr(config, "rope_parameters", None):
        return getattr(config, "max_position_embeddings", None)
    if all(reach.is_local for reach in ModelFacts.of(config).reaches):
        return None
    return _declared_length(config)


def reach_problem(model_config: "PreTrainedConfig", num_tokens: int) -> str | None:
    """Why a document of `num_tokens` is beyond the model's reach, and what to type."""
    stated = getattr(model_config, "max_position_embeddings", None)
    if stated and num_tokens <= stated:  # without a look at all layers
        return None
    reach = reachable_length(model_config)
    if reach is None or num_tokens <= reach:
        return None
    allow = (
        "allow_beyond_reach (LongContextConfig(allow_beyond_reach=True), --allow-beyond-reach) if "
        "the model is fine with longer ones"
    )
    config = text_config(model_config)
    rope = _current_rope(config, "none")
    if rope["rope_type"] != "default":
        return (
            f"the model's RoPE is already scaled (rope_type {rope['rope_type']!r}, reaching "
            f"{reach} tokens) and {num_tokens} are wanted: scaling twice is not defined. Start "
            "from the unscaled model, take a shorter sequence, or decide what replaces the scaling "
            f"and write it into its config.json: max_position_embeddings {num_tokens} "
            f"and{_instead(rope, num_tokens)}. Or set {allow}."
        )
    return (
        f"{num_tokens} tokens, but the model reaches {reach} (max_position_embeddings). "
        "Scale its RoPE: --rope yarn (or linear or dynamic); in Python before the model is loaded, "
        "config = longctx_patch.scale_rope(AutoConfig.from_pretrained(NAME), kind='yarn', "
        f"target_length={num_tokens}) and from_pretrained(NAME, config=config). Or take shorter "
        f"documents, or set {allow}."
    )


def _declared_length(config: "PreTrainedConfig") -> int:
    """The longest of what the config states and of what its kinds of scaling reach."""
    stated, rope = int(config.max_position_embeddings), config.rope_parameters
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]
    return max(stated, *(_scaled_length(stated, kind) for kind in kinds))


def _scaled_length(stated: int, rope: dict[str, Any]) -> int:
    """What a kind of scaling makes of the length before it, where that may be the stated one.

    Published YaRN configs (Qwen2.5, say) keep `max_position_embeddings` at it, and dynamic scaling
    is defined by that. Configs with the scaling of Llama 3 state what the model was trained for,
    which may be less than the factor reaches.
    """
    original = rope.get("original_max_position_embeddings") or stated
    reaches = ("yarn", "dynamic", *(("llama3",) if original >= stated else ()))
    return int(original * (rope.get("factor") or 1)) if rope["rope_type"] in reaches else stated


def _check_arguments(kind: str, target_length: int, factor: float | None) -> None:
    require_choice("kind", kind, get_args(RopeKind))
    if target_length < 1:
        raise ValueError(f"target_length={target_length}: a length in tokens, 1 or more.")
    if factor is None:
        return
    if kind == "none":
        raise ValueError(
            f"rope factor {factor} with rope kind 'none': a factor belongs to a kind of scaling. "
            "Choose linear, dynamic or yarn, or leave the factor out."
        )
    if factor < 1:
        raise ValueError(
            f"rope factor {factor}: scaling stretches positions, so it must be 1 or more."
        )


def _current_rope(model_config: "PreTrainedConfig", kind: str) -> dict[str, Any]:
    """RoPE of all layers; where kinds of layers differ and `kind` is `none`, that of one kind."""
    rope = getattr(model_config, "rope_parameters", None)
    length = getattr(model_config, "max_position_embeddings", None)
    if not rope or not length:
        raise ValueError(
            f"model type {model_config.model_type!r} declares no rope_parameters or no "
            "max_position_embeddings: only models with rotary embeddings can be scaled."
        )
    if "rope_type" not in rope and kind == "none":
        per_layer = [r for r in rope.values() if isinstance(r, dict)]
        order = ("dynamic", "yarn", "linear")
        return next(
            (r for kind in order for r in per_layer if r["rope_type"] == kind), per_layer[0]
        )
    if "rope_type" not in rope:
        raise ValueError(
            f"model type {model_config.model_type!r} has RoPE per layer type "
            f"({', '.join(rope)}): scaling those is not supported. Use rope kind 'none'."
        )
    return dict(rope)


def _refuse_unneeded(
    model_config: "PreTrainedConfig", rope: dict[str, Any], kind: str, target_length: int
) -> None:
    if kind not in ("none", rope["rope_type"]) or rope["rope_type"] == "dynamic":
        raise ValueError(
            f"rope kind {kind!r} for {target_length} tokens: the model already reaches "
            f"{_declared_length(model_config)} (rope_type {rope['rope_type']!r}). "
            "Use rope kind 'none': leave --rope out."
        )


def _refuse_unreachable(
    model_config: "PreTrainedConfig",
    rope: dict[str, Any],
    kind: str,
    target_length: int,
    factor: float | None,
) -> None:
    reach = _declared_length(model_config)
    problem = reach_problem(model_config, target_length)
    if problem and (kind == "none" or rope["rope_type"] != "default"):
        raise ValueError(problem)
    if kind != "dynamic" and factor is not None and factor * reach < target_length:
        raise ValueError(
            f"rope factor {factor} times {reach} tokens is {factor * reach:g}, less than the "
            f"{target_length} wanted. Use {target_length / reach:g} or more, or leave it out."
        )


def _instead(rope: dict[str, Any], target_length: int) -> str:
    """YaRN from the length before scaling, where the config says that length."""
    original = rope.get("original_max_position_embeddings")
    if not original:
        return " rope_parameters"
    factor = target_length / original
    return (
        f", for YaRN from its original {original} tokens, rope_parameters with rope_type yarn, "
        f"rope_theta {rope['rope_theta']:g}, factor {factor:g} and "
        f"original_max_position_embeddings {original}{_others(rope)}"
    )


def _others(rope: dict[str, Any]) -> str:
    """What else a scaled RoPE says, such as Ministral 3's temperature by position."""
    named = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")
    kept = [name for name in rope if name not in named]
    return f" ({', '.join(kept)} as they are)" if kept and rope["rope_type"] == "yarn" else ""


def _frozen_dynamic(
    model_config: "PreTrainedConfig", rope: dict[str, Any], target_length: int, factor: float
) -> "PreTrainedConfig":
    """Default RoPE with the base that transformers' dynamic NTK has at `target_length`."""
    scaled = copy.deepcopy(model_config)
    original_length = model_config.max_position_embeddings
    length = max(target_length, original_length)
    dim = int(ModelFacts.of(model_config).rotary_dim * rope.get("partial_rotary_factor", 1.0))
    if dim <= 2:
        raise ValueError(f"rope kind 'dynamic' needs a rotary dim above 2, this model has {dim}.")
    stretch = factor * length / original_length - (factor - 1)
    base = rope["rope_theta"] * stretch ** (dim / (dim - 2))
    kept = {name: value for name, value in rope.items() if name != "factor"}
    scaled.rope_parameters = {**kept, "rope_type": "default", "rope_theta": base}
    scaled.max_position_embeddings = length
    return scaled
