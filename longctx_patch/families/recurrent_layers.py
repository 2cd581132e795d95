"""Sizes of a model's recurrent layers, from its config alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from longctx_patch.families.facts import ModelFacts, given, text_config
from longctx_patch.families.family import CONVOLUTION, DELTA, STATE_SPACE
from longctx_patch.families.supported import FAMILIES
from longctx_patch.plans.recurrent import RecurrentShape

_Sizes = tuple[RecurrentShape | None, int, int]
"""(sizes of the recurrence, channels and tokens of the convolution)"""


class RecurrentLayers(NamedTuple):
    """The recurrent layers of a model, which are all alike."""

    num_layers: int
    recurrence: RecurrentShape | None
    """None: they are short convolutions alone."""
    channels: int
    """How many channels each layer's short convolution has."""
    reach: int
    """How many tokens before its own the convolution sees."""
    channel_bytes: int
    """Bytes of one token's number in a channel, over the batch."""


def recurrent_layers(config: Any, *, batch: int = 1, itemsize: int = 2) -> RecurrentLayers | None:
    """The recurrent layers of a supported model; None if it has none.

    Args:
        config: of transformers.
        batch: rows of a batch.
        itemsize: bytes of a number in the model's dtype.
    """
    config = text_config(config)
    number, kind = ModelFacts.of(config).num_recurrent, _kind_of(config)
    if not number or kind is None:
        return None
    shape, channels, taps = kind.sizes(config, batch, itemsize)
    return RecurrentLayers(number, shape, channels, taps - 1, batch * itemsize)


def kernel_packages(config: Any) -> tuple[str, ...]:
    """The packages, by pip's names, that the recurrent layers of a supported model need on a GPU;
    empty if it has none."""
    kind = _kind_of(text_config(config))
    return () if kind is None else kind.packages


def _channels(shape: RecurrentShape) -> int:
    """Counts the channels of queries, keys and values, or of C, B and x: all are convolved."""
    return 2 * shape.num_groups * shape.key_dim + shape.num_heads * shape.value_dim


def _convolution(config: Any, batch: int, itemsize: int) -> _Sizes:
    return None, config.hidden_size, config.conv_L_cache


def _delta_rule(config: Any, batch: int, itemsize: int) -> _Sizes:
    by_channel = given(config, "linear_num_heads") is not None  # Kimi Linear
    heads, dim = ("linear_num_heads", "linear_head_dim") if by_channel else ("", "")
    shape = RecurrentShape(
        kind="delta rule by channel" if by_channel else "delta rule",
        num_heads=getattr(config, heads or "linear_num_value_heads"),
        num_groups=getattr(config, heads or "linear_num_key_heads"),
        key_dim=getattr(config, dim or "linear_key_head_dim"),
        value_dim=getattr(config, dim or "linear_value_head_dim"),
        batch=batch,
        itemsize=itemsize,
    )
    return shape, _channels(shape), config.linear_conv_kernel_dim


def _state_space(config: Any, batch: int, itemsize: int) -> _Sizes:
    """Nemotron-H and Zamba 2 have names of their own."""

    def size(*names: str) -> int:
        return int(next(value for name in names if (value := given(config, name)) is not None))

    shape = RecurrentShape(
        kind="Mamba-2",
        num_heads=size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
        num_groups=size("mamba_n_groups", "n_groups", "mamba_ngroups"),
        key_dim=size("mamba_d_state", "ssm_state_size"),
        value_dim=size("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
        batch=batch,
        itemsize=itemsize,
    )
    return shape, _channels(shape), size("mamba_d_conv", "conv_kernel")


class _Kind(NamedTuple):
    packages: tuple[str, ...]
    """What its kernels need, by pip's names."""
    sizes: Callable[[Any, int, int], _Sizes]


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        CONVOLUTION: _Kind(("causal-conv1d",), _convolution),
        STATE_SPACE: _Kind(("causal-conv1d", "mamba-ssm"), _state_space),
        DELTA: _Kind(("causal-conv1d", "flash-linear-attention"), _delta_rule),
    }
)
"""By the feature that the table of support names."""


def _kind_of(config: Any) -> _Kind | None:
    family = FAMILIES.get(config.model_type)
    features = () if family is None else family.features
    return next((_KINDS[feature] for feature in features if feature in _KINDS), None)
