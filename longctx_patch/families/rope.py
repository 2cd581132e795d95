"""RoPE scaling for long contexts, written into a copy of a transformers config.

Every kind of scaling becomes a fixed set of frequencies. That matters for sequence parallelism:
transformers' own "dynamic" and "longrope" types choose their frequencies in each forward from the
largest position that the process sees (`modeling_rope_utils.dynamic_rope_update`: `seq_len =
position_ids.max() + 1`), so ranks holding different parts of one sequence would rotate by different
angles, silently. `scale_rope` therefore freezes "dynamic" at the target length, where it is an
ordinary RoPE with a larger base, and gives "longrope" its long factors at every length.

What is written is what transformers 5 and vLLM (`rotary_embedding/__init__.py`) both read: entries
of `rope_parameters` by transformers' names, without `type`, and without an attention factor of
YaRN's, which vLLM computes by itself.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.rope_facts import (
    KEPT,
    STRETCHED,
    RopeKind,
    check_kind,
    declared_length,
    describe_rope,
    full_attention_rope,
    reach_problem,
    reachable_length,
    ropes_of,
)
from longctx_patch.rules.names import require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Says what a kind of scaling is made of."""

    rope: dict[str, Any]
    """The RoPE to scale, without the scaling that is replaced."""
    original: int
    """The length, in tokens, that it reaches."""
    target: int
    factor: float | None = None
    theta: float | None = None
    factors: Sequence[float] | None = None
    exponent: float
    """The power of a stretch that the base takes for the slowest wave to be stretched so far."""
    num_frequencies: int

    @property
    def ratio(self) -> float:
        return float(self.factor or self.target / self.original)


@dataclass(frozen=True)
class _Kind:
    """A kind of scaling."""

    write: Callable[[_Wanted], dict[str, Any]]
    """Gives the entries of `rope_parameters` that make or replace those of the RoPE."""
    takes: str
    """The argument that decides how much it scales."""
    own: tuple[str, ...] = ()
    """Entries that stay if the model's RoPE is of this kind already."""


def scale_rope(
    model_config: "PreTrainedConfig",
    *,
    kind: RopeKind,
    target_length: int,
    factor: float | None = None,
    theta: float | None = None,
    factors: Sequence[float] | None = None,
) -> "PreTrainedConfig":
    """Return a copy of `model_config` whose RoPE reaches `target_length`; the given one is kept.

    With M the model's present length (`max_position_embeddings`), L the target and d the rotary
    dim:

    * `theta`: a larger base, `theta`. By default it is the larger of two: twice the NTK-aware base,
      `2 * rope_theta * (L / M) ** (d / (d - 2))`, which is what ProLong took for 64K
      (https://arxiv.org/abs/2410.02660), and the least base of L tokens, `0.0424 * L ** 1.628`
      (https://arxiv.org/abs/2405.14591, figure 1); rounded up to two digits.
    * `yarn`: `factor` (default L / M) with `original_max_position_embeddings` M
      (https://arxiv.org/abs/2309.00071).
    * `llama3`: the same of Llama 3.1's scaling, with its low and high frequency factors 1 and 4.
    * `longrope`: each frequency divided by its own of `factors`, d / 2 numbers that a search found
      (https://arxiv.org/abs/2402.13753), at every length. A model whose RoPE is of that type
      already keeps its long factors up to the length that they are for.
    * `linear`: all frequencies divided by `factor` (default L / M).
    * `dynamic`: transformers' dynamic NTK at length L with `factor` f (default 1), frozen: default
      RoPE with `rope_theta * (f * L / M - (f - 1)) ** (d / (d - 2))`. f = 1 stretches the slowest
      wave by exactly L / M. A model whose RoPE is of that type already is frozen at L, or at M if
      that is longer, with the factor it has.
    * `none`: nothing changes; L must be within what the model has. Models whose
      attention sees no positions (Nemotron-H, Kimi Linear) have no such limit.

    RoPE per layer type is scaled in full attention, and stays as it is in layers with a window. The
    scaling that a model has already is replaced, M being the length from before it; `linear` and
    `theta` go on from a linear one. `max_position_embeddings` becomes L (or `factor * M` where a
    larger factor was asked for). A config that already carries this kind and reaches L comes back
    unchanged.

    Raises ValueError for a model without RoPE in full attention, a target that needs scaling
    (`none`) or does not (the others), a kind that the config's readers can't have or would compute
    otherwise, an argument of another kind, too small a factor, or a base below the present one.

    >>> from transformers import LlamaConfig
    >>> scale_rope(LlamaConfig(), kind="yarn", target_length=8192).rope_parameters["factor"]
    4.0
    >>> scale_rope(LlamaConfig(), kind="theta", target_length=65536).rope_parameters["rope_theta"]
    3000000.0
    """
    _check_arguments(kind, target_length, factor, theta, factors)
    if kind == "none":
        return _as_it_is(model_config, target_length)
    _, rope = full_attention_rope(model_config)
    reach, is_same = declared_length(model_config), kind == rope["rope_type"]
    if is_same and kind == "longrope" and target_length <= reach and factors is None:
        return _with_rope(model_config, rope | _long_only(rope), reach)
    is_frozen_now = is_same and kind == "dynamic"
    if reachable_length(model_config) is None and not is_frozen_now:
        raise ValueError(
            f"rope kind {kind!r} with model type {model_config.model_type!r}: it reaches any "
            "length, since its attention sees no positions or no farther than its windows. Use "
            "rope kind 'none': leave --rope out."
        )
    if target_length <= reach and not is_frozen_now:
        asked = {"factor": factor, "long_factor": factors}
        _refuse_unneeded(rope, kind, f"{target_length} tokens", reach, asked)
        return copy.deepcopy(model_config)
    check_kind(model_config, rope, kind)
    wanted = _wanted(model_config, rope, target_length)
    wanted = replace(wanted, factor=factor, theta=theta, factors=factors)
    length = max(target_length, wanted.original)
    if kind == "dynamic":
        wanted = replace(wanted, factor=factor or (rope["factor"] if is_frozen_now else 1.0))
    elif factor is not None:
        length = max(length, round(_checked_factor(wanted) * wanted.original))
    own = {name: rope[name] for name in _KINDS[kind].own if is_same and name in rope}
    return _with_rope(model_config, wanted.rope | _KINDS[kind].write(wanted) | own, length)


def chosen_theta(config: "PreTrainedConfig", target_length: int) -> tuple[float, str]:
    """The base that kind `theta` takes for a length, and why it is this one."""
    return _theta_of(_wanted(config, full_attention_rope(config)[1], target_length))


def _check_arguments(
    kind: str,
    target_length: int,
    factor: float | None,
    theta: float | None,
    factors: Sequence[float] | None,
) -> None:
    require_choice("kind", kind, get_args(RopeKind))
    if target_length < 1:
        raise ValueError(f"target_length={target_length}: a length in tokens, 1 or more.")
    given = {"factor": factor, "theta": theta, "factors": factors}
    for name, value in given.items():
        kinds = [other for other, facts in _KINDS.items() if facts.takes == name]
        if value is not None and kind not in kinds:
            raise ValueError(
                f"rope {name} {value} with rope kind {kind!r}: it belongs to {' or '.join(kinds)}. "
                f"Choose that kind, or leave the {name} out."
            )
    if factor is not None and not 1 <= factor < math.inf:
        raise ValueError(
            f"rope factor {factor}: scaling stretches positions, so it must be 1 or more."
        )
    if factors is not None and not all(0 < number < math.inf for number in factors):
        raise ValueError("rope factors: each divides a frequency, and is a number above 0.")


def _as_it_is(model_config: "PreTrainedConfig", target_length: int) -> "PreTrainedConfig":
    """The config as it is, which has to reach the length; where attention sees no positions, only
    a stated length is in the way."""
    found = copy.deepcopy(model_config)
    if reachable_length(model_config) is None:
        if stated := getattr(model_config, "max_position_embeddings", None):
            found.max_position_embeddings = max(stated, target_length)
        return found
    if any(rope["rope_type"] == "dynamic" for rope in ropes_of(model_config)):
        raise ValueError(
            "the model's RoPE is of type 'dynamic': its frequencies depend on the largest position "
            "that each process sees, so ranks would disagree. Use rope kind 'dynamic' (--rope "
            "dynamic), which freezes it at the target length."
        )
    if problem := reach_problem(model_config, target_length):
        raise ValueError(problem)
    return found


def _refuse_unneeded(
    rope: dict[str, Any], kind: str, wanted: str, reach: int, asked: Mapping[str, Any]
) -> None:
    """Refuse scaling to a length that is reached, unless it is the scaling that is there."""
    if kind == rope["rope_type"] and all(v in (None, rope.get(n)) for n, v in asked.items()):
        return
    raise ValueError(
        f"rope kind {kind!r} for {wanted}: the model already reaches {reach} "
        f"({describe_rope(rope, reach)}). Use rope kind 'none' (leave --rope out), or aim at a "
        "longer context (--context)."
    )


def _wanted(config: "PreTrainedConfig", rope: dict[str, Any], target_length: int) -> _Wanted:
    is_stretched = rope["rope_type"] in STRETCHED
    base = {name: value for name, value in rope.items() if name in KEPT}
    if is_stretched:
        base |= {"factor": rope["factor"]} if "factor" in rope else {}
    else:
        base["rope_type"] = "default"
    original = None if is_stretched else rope.get("original_max_position_embeddings")
    head_dim, share = ModelFacts.of(config).rotary_dim, rope.get("partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    if dim <= 2:
        raise ValueError(f"scaling needs a rotary dim above 2, this model has {dim}.")
    # Of type proportional, waves are as far apart as if all of the head's were there.
    is_proportional = rope["rope_type"] == "proportional"
    return _Wanted(
        rope=base,
        original=int(original or config.max_position_embeddings),
        target=target_length,
        exponent=(head_dim if is_proportional else dim) / (dim - 2),
        num_frequencies=-(-dim // 2),
    )


def _checked_factor(wanted: _Wanted) -> float:
    reached = wanted.ratio * wanted.original
    if reached < wanted.target:
        raise ValueError(
            f"rope factor {wanted.factor} times {wanted.original} tokens is {reached:g}, less than "
            f"the {wanted.target} wanted. Use {wanted.target / wanted.original:g} or more, or "
            "leave it out."
        )
    return wanted.ratio


def _with_rope(config: "PreTrainedConfig", rope: dict[str, Any], length: int) -> "PreTrainedConfig":
    layer_type, _ = full_attention_rope(config)
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {**config.rope_parameters, layer_type: rope} if layer_type else rope
    scaled.max_position_embeddings = length
    original = rope.get("original_max_position_embeddings")
    if original and hasattr(config, "original_max_position_embeddings"):
        scaled.original_max_position_embeddings = original  # which transformers prefers
    return scaled


def _theta(wanted: _Wanted) -> dict[str, Any]:
    present, theta = wanted.rope["rope_theta"], wanted.theta
    if theta is None:
        return {"rope_theta": _theta_of(wanted)[0]}
    if not present < theta < math.inf:
        raise ValueError(
            f"rope theta {theta:g}: the model has {present:g}, and longer contexts need a larger "
            f"base. Leave it out for {_theta_of(wanted)[0]:g}."
        )
    return {"rope_theta": float(theta)}


def _theta_of(wanted: _Wanted) -> tuple[float, str]:
    stretch = wanted.target / wanted.original
    twice = 2 * wanted.rope["rope_theta"] * stretch**wanted.exponent
    least = 0.0424 * wanted.target**1.628
    why = "twice the NTK-aware base, as ProLong took (arXiv 2410.02660)"
    if least > twice:
        why = f"the least base of {wanted.target} tokens (arXiv 2405.14591)"
    unit = 10.0 ** (math.floor(math.log10(max(least, twice))) - 1)
    return math.ceil(max(least, twice) / unit) * unit, why


def _yarn(wanted: _Wanted) -> dict[str, Any]:
    original = wanted.original
    scaling = {"factor": wanted.ratio, "original_max_position_embeddings": original}
    return {"rope_type": "yarn", **scaling}


def _llama3(wanted: _Wanted) -> dict[str, Any]:
    waves = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _yarn(wanted) | {"rope_type": "llama3", **waves}


def _longrope(wanted: _Wanted) -> dict[str, Any]:
    found = [float(number) for number in wanted.factors or ()]
    if len(found) != wanted.num_frequencies:
        raise ValueError(
            f"rope kind 'longrope' with {len(found)} factors: it divides each of the model's "
            f"{wanted.num_frequencies} frequencies by its own, which a search finds for the model "
            f"and the length. Give a JSON list of {wanted.num_frequencies} numbers (--rope-factors "
            "FILE, factors=[...]), such as a published long_factor; or use --rope theta."
        )
    scaling = {"long_factor": found, "short_factor": [*found]}
    return _yarn(wanted) | {"rope_type": "longrope", **scaling}


def _long_only(rope: dict[str, Any]) -> dict[str, Any]:
    """The long factors of a published RoPE at every length, with the scale of attention there."""
    names = {"short_factor": "long_factor", "short_mscale": "long_mscale"}
    return {short: rope[long] for short, long in names.items() if long in rope}


def _linear(wanted: _Wanted) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": wanted.rope.get("factor", 1.0) * wanted.ratio}


def _dynamic(wanted: _Wanted) -> dict[str, Any]:
    """The base that transformers' dynamic NTK has at the length."""
    length, factor = max(wanted.target, wanted.original), wanted.ratio
    stretch = factor * length / wanted.original - (factor - 1)
    return {"rope_theta": wanted.rope["rope_theta"] * stretch**wanted.exponent}


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "theta": _Kind(_theta, "theta"),
        "yarn": _Kind(
            _yarn, "factor", ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
        ),
        "llama3": _Kind(_llama3, "factor", ("low_freq_factor", "high_freq_factor")),
        "longrope": _Kind(_longrope, "factors"),
        "linear": _Kind(_linear, "factor"),
        "dynamic": _Kind(_dynamic, "factor"),
    }
)
