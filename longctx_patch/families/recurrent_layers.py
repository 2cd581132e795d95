"""Sizes of a model's recurrent layers, from its config alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from longctx_patch.families.facts import ModelFacts, given, text_config
from longctx_patch.families.family import CONVOLUTION, DELTA, STATE_SPACE
from longctx_patch.families.supported import FAMILIES
from longctx_patch.plans.recurrent import RecurrentShape


class RecurrentLayers(NamedTuple):
    """The recurrent layers of a model, which are all alike."""

    num_layers: int
    recurrence: RecurrentShape | None
    """None: they are short convolutions alone."""


def recurrent_layers(config: Any) -> RecurrentLayers | None:
    """The recurrent layers of a supported model, by its config; None if it has none. Sizes are
    those of a row in 16 bits."""
    config = text_config(config)
    number, kind = ModelFacts.of(config).num_recurrent, _kind_of(config)
    if not number or kind is None:
        return None
    return RecurrentLayers(number, None if kind.shape is None else kind.shape(config))


def kernel_packages(config: Any) -> tuple[str, ...]:
    """The packages, by pip's names, that the recurrent layers of a supported model need on a GPU;
    empty if it has none."""
    kind = _kind_of(text_config(config))
    return () if kind is None else kind.packages


def _delta_rule(config: Any) -> RecurrentShape:
    by_channel = given(config, "linear_num_heads") is not None  # Kimi Linear
    heads, dim = ("linear_num_heads", "linear_head_dim") if by_channel else ("", "")
    return RecurrentShape(
        kind="delta rule by channel" if by_channel else "delta rule",
        num_heads=getattr(config, heads or "linear_num_value_heads"),
        num_groups=getattr(config, heads or "linear_num_key_heads"),
        key_dim=getattr(config, dim or "linear_key_head_dim"),
        value_dim=getattr(config, dim or "linear_value_head_dim"),
    )


def _state_space(config: Any) -> RecurrentShape:
    """Nemotron-H and Zamba 2 have names of their own."""

    def size(*names: str) -> int:
        return int(next(value for name in names if (value := given(config, name)) is not None))

    return RecurrentShape(
        kind="Mamba-2",
        num_heads=size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
        num_groups=size("mamba_n_groups", "n_groups", "mamba_ngroups"),
        key_dim=size("mamba_d_state", "ssm_state_size"),
        value_dim=size("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
    )


class _Kind(NamedTuple):
    packages: tuple[str, ...]
    """What its kernels need, by pip's names."""
    shape: Callable[[Any], RecurrentShape] | None = None
    """Reads the sizes of its recurrence from a config; None: it has none."""


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        CONVOLUTION: _Kind(("causal-conv1d",)),
        STATE_SPACE: _Kind(("causal-conv1d", "mamba-ssm"), _state_space),
        DELTA: _Kind(("causal-conv1d", "flash-linear-attention"), _delta_rule),
    }
)
"""By the feature that the table of support names."""


def _kind_of(config: Any) -> _Kind | None:
    family = FAMILIES.get(config.model_type)
    features = () if family is None else family.features
    return next((_KINDS[feature] for feature in features if feature in _KINDS), None)
