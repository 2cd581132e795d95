"""Whether the kernels of recurrent layers are installed, and take the sizes of a model."""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from longctx_patch.hf.model import transformers_api


class Limit(NamedTuple):
    """What a package's kernels take at most."""

    what: str
    most: int
    of: Callable[[Any], int]
    """A layer's number."""


def _key_size(layer: Any) -> int:
    """Of a head in a gated delta net, or in Kimi Delta Attention."""
    return int(layer.head_k_dim if hasattr(layer, "head_k_dim") else layer.head_dim)


def _width(layer: nn.Module) -> int:
    return max((m.kernel_size[0] for m in layer.modules() if isinstance(m, nn.Conv1d)), default=1)


_KEYS = Limit("numbers of a key head", 256, _key_size)
LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "torch_chunk_gated_delta_rule": _KEYS,
        "chunk_kimi_delta_attention": _KEYS,
        "causal_conv1d_fn": Limit("tokens of a convolution", 4, _width),
    }
)
"""Kernels assert them in a run's first forward: fla 0.6 (`ops/common/chunk_delta_h.py`); widths of
2, 3 and 4 tokens are those of causal-conv1d's README."""


def check_kernels(mixers: Iterable[nn.Module], *, torch_will_do: bool) -> None:
    """Raise ValueError for layers on a GPU whose kernels are missing, unless `torch_will_do`, or do
    not take a layer's size: where a package is installed, transformers always takes its kernels."""
    layers = {(type(mixer), name): mixer for mixer in mixers for name in _functions_of(mixer)}
    missing = sorted(
        f"{distribution} for {name}"
        for name in {name for _, name in layers}
        for package, distribution in (transformers_api.KERNEL_PACKAGES[name],)
        if find_spec(package) is None
    )
    if missing and not torch_will_do:
        packages = " ".join(sorted({each.split()[0] for each in missing}))
        raise ValueError(
            f"recurrent layers on a GPU without their kernels: {', '.join(missing)}. Either pip "
            f"install {packages}, or run transformers' torch functions by "
            "LongContextConfig(torch_recurrence=True), which are exact, many times slower, and "
            "keep all intermediates for backward."
        )
    for (_, name), mixer in layers.items():
        _check_size(name, mixer)


def _functions_of(mixer: nn.Module) -> set[str]:
    names = transformers_api.code_of(type(mixer)).__code__.co_names
    return set(names) & transformers_api.KERNEL_PACKAGES.keys()


def _check_size(name: str, mixer: nn.Module) -> None:
    limit, (package, distribution) = LIMITS.get(name), transformers_api.KERNEL_PACKAGES[name]
    if limit is None or find_spec(package) is None or limit.of(mixer) <= limit.most:
        return
    raise ValueError(
        f"{type(mixer).__name__} with {limit.of(mixer)} {limit.what}: the kernels of "
        f"{distribution} take up to {limit.most}. pip uninstall {distribution}, and run "
        "transformers' torch functions by LongContextConfig(torch_recurrence=True), which take "
        "any size but are many times slower; or use a model with smaller ones."
    )
