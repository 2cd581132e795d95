"""Values in a model's config that no model can have: refused with the field, before weights are
read.

transformers' own config classes refuse some of them, and only in newer versions; others give NaN,
or fail where a layer is built.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from longctx_patch.families.facts import given
from longctx_patch.rules.names import did_you_mean

COUNTS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
"""What is 1 or more; None where a family leaves it open, a list where layers differ."""
RECURRENT_HEADS = (
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("n_mamba_heads", "mamba_ngroups"),
)
"""Heads with a state, and the key heads or groups that these share evenly."""
ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
"""What is above 0 in `rope_parameters`, where it is given."""
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
ACTIVATIONS = ("hidden_act", "hidden_activation")


def problem_of(config: Any, *, as_written: bool = False) -> str | None:
    """The first field that can't be right, with its value and the rule; None: there is none.

    `as_written`: it has the fields of a file that no config class has read, whose sizes may make
    that class fail.
    """
    sizes = (_of_counts, _of_heads, _of_recurrent_heads)
    checks = sizes if as_written else (*sizes, _of_rope, _of_numbers, _of_names)
    return next((problem for check in checks for problem in check(config)), None)


def _of_counts(config: Any) -> Iterator[str]:
    for name in (*COUNTS, *chain.from_iterable(RECURRENT_HEADS)):
        value = given(config, name)
        if value is None or isinstance(value, list | tuple):
            continue
        if type(value) is not int or value < 1:
            yield f"{name}={value!r}: it counts something, and is a whole number, 1 or more"
    window = getattr(config, "sliding_window", None)
    if window is not None and (type(window) is not int or window < 0):
        yield f"sliding_window={window!r}: a window is a whole number of tokens, or null"


def _of_heads(config: Any) -> Iterator[str]:
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, kv_heads, hidden, head_dim = (given(config, name) for name in names)
    if not isinstance(heads, int):
        return
    if isinstance(kv_heads, int) and heads % kv_heads:
        yield (
            f"num_key_value_heads={kv_heads}: it must divide num_attention_heads={heads}, since "
            "as many query heads share each key-value head"
        )
    if isinstance(hidden, int) and head_dim in (None, hidden // heads) and hidden % heads:
        yield (
            f"hidden_size={hidden}: num_attention_heads={heads} must divide it where no head_dim "
            "is given"
        )


def _of_recurrent_heads(config: Any) -> Iterator[str]:
    for names in RECURRENT_HEADS:
        heads, groups = (given(config, name) for name in names)
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            yield (
                f"{names[1]}={groups}: it must divide {names[0]}={heads}, since as many heads with "
                "a state share each of them"
            )


def _of_rope(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, dict):
        yield f"rope_parameters={rope!r}: it is an object with a rope_theta"
        return
    per_kind = {f"rope_parameters.{n}": r for n, r in rope.items() if isinstance(r, dict)}
    for place, values in (per_kind or {"rope_parameters": rope}).items():
        for name in ROPE_NUMBERS:
            value = values.get(name)
            if name in values and not _is_number(value) and (value is not None or "theta" in name):
                yield f"{name}={value!r} in {place}: it is a number, without quotes"
            elif value is not None and not 0 < value < math.inf:
                yield f"{name}={value!r} in {place}: it is a finite number above 0"


def _of_numbers(config: Any) -> Iterator[str]:
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}={value!r}: it is a finite number"
    for name in EPSILONS:
        value = getattr(config, name, None)
        if value is not None and (not _is_number(value) or value < 0):
            yield f"{name}={value!r}: it is a small number, 0 or more"
    pad, vocabulary = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        yield f"pad_token_id={pad}: the vocabulary has the tokens 0 to {vocabulary - 1}"


def _of_names(config: Any) -> Iterator[str]:
    from torch import dtype
    from transformers.activations import ACT2FN

    for name in ACTIVATIONS:
        value = getattr(config, name, None)
        if value is not None and value not in ACT2FN:
            meant = did_you_mean(value, ACT2FN)
            yield f"{name}={value!r}: transformers has no such activation.{meant}".rstrip(".")
    value = getattr(config, "dtype", None)
    if value is not None and not (isinstance(value, dtype) and value.is_floating_point):
        yield f"dtype={value}: weights have a floating-point dtype, such as bfloat16"
    architectures = getattr(config, "architectures", None)
    if architectures is not None and not isinstance(architectures, list | tuple):
        yield f"architectures={architectures!r}: it is a list of names"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
