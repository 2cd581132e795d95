"""Reads a config's RoPE: how far it reaches, how it is scaled, what could scale it.

This needs neither torch nor transformers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from longctx_patch.families.facts import FULL, ModelFacts, is_latent, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RopeKind = Literal["none", "theta", "yarn", "llama3", "longrope", "linear", "dynamic"]
SCALINGS: tuple[RopeKind, ...] = ("theta", "yarn", "llama3", "longrope", "linear", "dynamic")
LONGROPE_PER_TYPE = Version("5.21")
"""The first transformers that runs longrope for one type of layers more than once."""
STRETCHED = ("default", "linear", "proportional")
"""RoPE types that state no length from before their scaling: they can be stretched further."""
WITHOUT_POSITIONS = frozenset({"kimi_linear", "nemotron_h"})
"""Model types whose attention sees no positions, since their recurrent layers do."""
KEPT = frozenset(
    {
        *("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section"),
        *("mrope_interleaved", "llama_4_scaling_beta"),
    }
)
"""Entries of `rope_parameters` that belong to no kind of scaling."""
_OF_SCALINGS = frozenset(
    {
        *("type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor"),
        *("high_freq_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
    }
)
"""Entries that go with the scaling that is replaced, but for a kind's own, if it stays."""
_BLIND_WITHOUT_WINDOW = frozenset(
    {
        *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "kolibri1", "llama4_text"),
    }
)
"""Model types with positions in layers with a window or chunks alone, if they have such layers."""
_Restriction = tuple[Callable[[Any, Mapping[str, Any]], bool], tuple[RopeKind, ...], str]
_RESTRICTIONS: tuple[_Restriction, ...] = (
    (
        lambda config, rope: (
            config.model_type in _BLIND_WITHOUT_WINDOW
            and any(reach.is_local for reach in ModelFacts.of(config).reaches)
        ),
        (),
        "its full attention sees no positions, and layers with a window or chunks see no farther "
        "with any scaling",
    ),
    (
        lambda config, rope: bool(getattr(config, "layer_rope_theta", None)),
        (),
        "its layers have bases of their own (layer_rope_theta)",
    ),
    (
        lambda config, rope: rope["rope_type"] == "proportional",
        ("theta",),
        "RoPE of type 'proportional' has its waves elsewhere than other types, and no factor in "
        "vLLM",
    ),
    (
        lambda config, rope: rope["rope_type"] == "linear",
        ("theta", "linear"),
        "RoPE of type 'linear' does not state the length from before its scaling",
    ),
    (
        lambda config, rope: config.model_type == "gpt_oss" or "llama_4_scaling_beta" in rope,
        ("yarn",),
        "transformers or vLLM computes this model with YaRN's numbers whatever its type says",
    ),
    (
        lambda config, rope: config.model_type == "phi3",
        ("theta", "dynamic", "longrope"),
        "transformers reads no scaling in its config but longrope",
    ),
    (
        lambda config, rope: config.model_type == "phimoe",
        ("theta", "dynamic"),
        "transformers reads no scaling in its config but longrope, and takes the wrong factors",
    ),
    (
        lambda config, rope: is_latent(config) or "mrope_section" in rope,
        ("theta", "yarn", "dynamic"),
        "vLLM computes latent attention and M-RoPE with no scaling but YaRN",
    ),
    (
        lambda config, rope: (
            "rope_type" not in config.rope_parameters
            and Version(version("transformers")) < LONGROPE_PER_TYPE
        ),
        tuple(kind for kind in SCALINGS if kind != "longrope"),
        f"transformers before {LONGROPE_PER_TYPE} raises an error in the second pass with longrope "
        "for one type of layers",
    ),
)
"""(whether it is so, the kinds that are left, why): what would be read by nobody, or otherwise by
vLLM than by transformers."""


def possible_kinds(config: "PreTrainedConfig") -> tuple[tuple[RopeKind, ...], str]:
    """The kinds of scaling that the config's readers compute alike, and why no others."""
    try:
        _, rope = full_attention_rope(config)
    except ValueError as error:
        return (), str(error)
    found, reasons = SCALINGS, []
    for is_so, kinds, why in _RESTRICTIONS:
        left = tuple(kind for kind in found if kind in kinds)
        if left != found and is_so(config, rope):
            found = left
            reasons.append(why)
    return found, "; ".join(reasons)


def check_kind(config: "PreTrainedConfig", rope: dict[str, Any], kind: str) -> None:
    """Raise ValueError for a kind of scaling that would go wrong with what the config has."""
    possible, why = possible_kinds(config)
    if kind not in possible:
        raise ValueError(
            f"rope kind {kind!r} with model type {config.model_type!r} ({rope['rope_type']}): "
            f"{why}. {_use(possible)}"
        )
    if unknown := sorted(rope.keys() - KEPT - _OF_SCALINGS):
        raise ValueError(
            f"rope_parameters of the model have {', '.join(unknown)}, which is not known here, so "
            "that nobody can say what scaling would do to it. Take it out of config.json if it is "
            "nothing to its RoPE."
        )
    attention, factor = rope.get("attention_factor"), rope.get("factor")
    usual = 0.1 * math.log(factor) + 1 if factor else None
    is_usual = attention is None or (usual and math.isclose(attention, usual, rel_tol=1e-6))
    if kind == rope["rope_type"] == "yarn" and not is_usual:
        raise ValueError(
            f"attention_factor={attention} in the model's rope_parameters is for its own factor "
            f"{factor}, and YaRN's is {usual}: say in config.json what it is to be, by taking it "
            "out (then it follows the factor), or use another kind of scaling."
        )


def _use(possible: Sequence[str]) -> str:
    return f"Use --rope {' or '.join(possible)}." if possible else "Leave --rope out."


def full_attention_rope(config: "PreTrainedConfig") -> tuple[str | None, dict[str, Any]]:
    """(its layer type, RoPE of the layers with full attention); None where all layers have one.

    Raises ValueError for a model without RoPE in such layers.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or not getattr(config, "max_position_embeddings", None):
        raise ValueError(
            f"model type {config.model_type!r} declares no rope_parameters or no "
            "max_position_embeddings: only models with rotary embeddings can be scaled."
        )
    if "rope_type" in rope:
        return None, dict(rope)
    if not rope.get(FULL):
        raise ValueError(
            f"model type {config.model_type!r} has RoPE per layer type ({', '.join(rope)}), none "
            "of them in full attention: there is nothing to scale. Leave --rope out."
        )
    return FULL, dict(rope[FULL])


def ropes_of(config: "PreTrainedConfig") -> list[dict[str, Any]]:
    """RoPE of each layer type that has one; one where all layers have the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]


def follows_length(rope: Mapping[str, Any]) -> bool:
    """Says whether transformers takes the frequencies from the largest position that it sees."""
    kind = rope.get("rope_type")
    is_switched = rope.get("long_factor") != rope.get("short_factor") or "long_factor" not in rope
    return kind == "dynamic" or (kind == "longrope" and is_switched)


def describe_rope(rope: Mapping[str, Any], stated: int) -> str:
    """Such as `llama3 x8 from 8192`; `default` for RoPE that is not scaled."""
    original = rope.get("original_max_position_embeddings")
    factor = rope.get("factor") or (stated / original if original else None)
    text = str(rope["rope_type"]) + (f" x{factor:g}" if factor else "")
    return text + (f" from {original}" if original else "")


def describe_change(before: "PreTrainedConfig", after: "PreTrainedConfig") -> str:
    """Returns what became of a RoPE: `factor 32 from 8192 tokens; replaces llama3 x8 from 8192`."""
    layer_type, old = full_attention_rope(before)
    _, new = full_attention_rope(after)
    was = describe_rope(old, before.max_position_embeddings)
    if old == new:
        return f"as published ({was})"
    said, factor = [], new.get("factor")
    if new["rope_theta"] != old["rope_theta"]:
        said.append(f"rope_theta {old['rope_theta']:g} to {new['rope_theta']:g}")
    if factor:
        original = new.get("original_max_position_embeddings")
        said.append(f"factor {factor:g}" + (f" from {original} tokens" if original else ""))
    if old["rope_type"] == new["rope_type"] == "longrope":
        said.append("its long factors at every length")
    elif (old["rope_type"], old.get("factor")) not in (
        ("default", None),
        (new["rope_type"], factor),
    ):
        said.append(f"replaces {was}")
    return "; ".join([*said, *(["in full attention alone"] if layer_type else [])])


def reachable_length(model_config: "PreTrainedConfig") -> int | None:
    """The longest document, in tokens, that the config declares, its own scaling included.

    None: any. That is so where attention sees no positions, and where every layer has a window or
    chunks within that length: rotations depend on distances alone, which then stay below it.
    """
    config = text_config(model_config)
    # Granite 4's says "nope" where its attention layers see no positions.
    is_blind = getattr(config, "position_embedding_type", "rope") != "rope"
    if is_blind or config.model_type in WITHOUT_POSITIONS:
        return None
    if not getattr(config, "rope_parameters", None):
        return getattr(config, "max_position_embeddings", None)
    length = declared_length(config)
    reaches = ModelFacts.of(config).reaches
    # A layer whose window or chunks are no longer sees no farther, however long the row is.
    is_local = all(any(size and size <= length for size in reach) for reach in reaches)
    return None if is_local else length


def reach_problem(model_config: "PreTrainedConfig", num_tokens: int) -> str | None:
    """Says why a document of `num_tokens` is beyond the model's reach, and what to type."""
    stated = getattr(model_config, "max_position_embeddings", None)
    if stated and num_tokens <= stated:  # without a look at all layers
        return None
    reach = reachable_length(model_config)
    if reach is None or num_tokens <= reach:
        return None
    how = _how_to_scale(text_config(model_config), num_tokens)
    return (
        f"{num_tokens} tokens, but the model reaches {reach} (max_position_embeddings). "
        f"{how} Otherwise take shorter documents, or set "
        "allow_beyond_reach (LongContextConfig(allow_beyond_reach=True), --allow-beyond-reach) if "
        "the model is fine with longer ones."
    )


def _how_to_scale(config: "PreTrainedConfig", num_tokens: int) -> str:
    """A sentence on what to type, or why nothing would help."""
    kinds, why = possible_kinds(config)
    if not kinds:
        return f"Its RoPE can't be scaled: {why.removesuffix('.')}."
    named = describe_rope(full_attention_rope(config)[1], config.max_position_embeddings)
    what = "Scale its RoPE" if named == "default" else f"Replace its scaling ({named})"
    return (
        f"{what}: {' or '.join(f'--rope {kind}' for kind in kinds[:2])}; in Python before the "
        "model is loaded, config = longctx_patch.scale_rope(AutoConfig.from_pretrained(NAME), "
        f"kind={kinds[0]!r}, target_length={num_tokens}) and from_pretrained(NAME, "
        "config=config)."
    )


def declared_length(config: "PreTrainedConfig") -> int:
    """The longest of what the config states and of what its kinds of scaling reach."""
    stated = int(config.max_position_embeddings)
    return max(stated, *(_scaled_length(stated, rope) for rope in ropes_of(config)))


def _scaled_length(stated: int, rope: dict[str, Any]) -> int:
    """Returns what a kind of scaling makes of the length before it, where that may be the stated
    one.

    Published YaRN configs (Qwen2.5, say) keep `max_position_embeddings` at it, and dynamic scaling
    is defined by that. Configs with the scaling of Llama 3 state what the model was trained for,
    which may be less than the factor reaches.
    """
    original = rope.get("original_max_position_embeddings") or stated
    reaches = ("yarn", "dynamic", *(("llama3",) if original >= stated else ()))
    return int(original * (rope.get("factor") or 1)) if rope["rope_type"] in reaches else stated
