"""Says whether recurrent layers run kernels, whether these take the sizes of a model, and how many
tokens they can count in transformers' own forward.

A chain copies or cuts up what a kernel can't count the places of. transformers' own forward hands
it on, and its results are wrong without an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from longctx_patch.engine.chain.extents import MOST_PLACES, MOST_UNSIGNED_PLACES
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of, runs_kernel


class Limit(NamedTuple):
    """Says what a package's kernels take."""

    what: str
    takes: range
    said: str
    of: Callable[[Any], int]
    """A layer's number."""


def _key_size(layer: Any) -> int:
    """The key size of a head in a gated delta net, or in Kimi Delta Attention."""
    return int(layer.head_k_dim if hasattr(layer, "head_k_dim") else layer.head_dim)


def _taps(layer: nn.Module) -> int:
    return max((conv.kernel_size[0] for conv in _convolutions(layer)), default=2)


def _channels(layer: nn.Module) -> int:
    """Finds a convolution's number of channels that is no multiple of 8, if there is one."""
    return max((conv.out_channels for conv in _convolutions(layer)), key=lambda n: n % 8, default=8)


def _convolutions(layer: nn.Module) -> list[nn.Conv1d]:
    return [module for module in layer.modules() if isinstance(module, nn.Conv1d)]


_KEYS = Limit("numbers of a key head", range(1, 257), "take up to 256", _key_size)
LIMITS: Mapping[str, tuple[Limit, ...]] = MappingProxyType(
    {
        "torch_chunk_gated_delta_rule": (_KEYS,),
        "chunk_kimi_delta_attention": (_KEYS,),
        "causal_conv1d_fn": (
            Limit("tokens of a convolution", range(2, 5), "take 2 to 4", _taps),
            Limit(
                "channels of a convolution", range(0, 2**31, 8), "take multiples of 8", _channels
            ),
        ),
    }
)
"""Kernels assert them in a run's first forward: fla 0.6 (`ops/common/chunk_delta_h.py`, of keys
alone) and causal-conv1d 1.7 (`csrc/causal_conv1d.cpp`). The scan of mamba-ssm 2.3 has none."""


def check_kernels(mixers: Iterable[nn.Module], *, torch_will_do: bool) -> None:
    """Raise ValueError for layers on a GPU that would run transformers' torch functions, unless
    `torch_will_do`, or whose kernels do not take a layer's size.

    transformers takes a kernel wherever it can import it, and falls back on its torch function in
    silence after any error of a package that is installed.
    """
    layers = {
        (type(mixer), name): (mixer, function)
        for mixer in mixers
        for name, function in functions_of(mixer).items()
    }
    slow = {name for (_, name), (_, function) in layers.items() if not runs_kernel(function)}
    if slow and not torch_will_do:
        raise ValueError(_refusal(sorted(slow)))
    for (_, name), (mixer, _) in layers.items():
        if name not in slow:
            _check_sizes(name, mixer)


def _refusal(names: Sequence[str]) -> str:
    packages = " ".join(sorted({KERNELS[name].distribution for name in names}))
    return (
        f"recurrent layers on a GPU without their kernels: {', '.join(map(_why, names))}. Either "
        f"pip install {packages} (built for the installed torch), or run transformers' torch "
        "functions by LongContextConfig(torch_recurrence=True), which are exact, many times "
        "slower, and keep all intermediates for backward."
    )


def _why(name: str) -> str:
    kernel = KERNELS[name]
    said = f"{kernel.distribution} for {name}"
    if not kernel.is_installed:
        return said
    error = kernel.import_error()
    if error is None:
        return (
            f"{said} (it can be imported now, but could not when transformers was: install "
            "packages before a process starts)"
        )
    return f"{said} (it is installed, but importing {kernel.module} raises {error!r})"


def _check_sizes(name: str, mixer: nn.Module) -> None:
    distribution = KERNELS[name].distribution
    for limit in LIMITS.get(name, ()):
        if limit.of(mixer) in limit.takes:
            continue
        raise ValueError(
            f"{type(mixer).__name__} with {limit.of(mixer)} {limit.what}: the kernels of "
            f"{distribution} {limit.said}. pip uninstall {distribution}, and run "
            "transformers' torch functions by LongContextConfig(torch_recurrence=True), which take "
            "any size but are many times slower; or use a model of other sizes."
        )


_CONVOLUTION, _SCAN = "causal_conv1d_fn", "mamba2_chunk_scan"


class Countable(NamedTuple):
    """Says what one package's kernels can count."""

    tokens: int
    """How many tokens all rows of a batch have together."""
    package: str

    def problem(self, num_tokens: int) -> str | None:
        """Says why a batch of so many tokens can't have transformers' own forward."""
        if num_tokens <= self.tokens:
            return None
        return (
            f"{num_tokens:,} tokens in one call of transformers' own forward: kernels of "
            f"{self.package} compute wrong numbers of this model there beyond {self.tokens:,}"
        )


def countable(mixers: Iterable[nn.Module]) -> Countable | None:
    """The least of all layers; None where no kernel counts with 32 bits."""
    return min((each for mixer in mixers for each in _of_layer(mixer)), default=None)


def _of_layer(mixer: Any) -> Iterator[Countable]:
    kernels = {name for name, function in functions_of(mixer).items() if runs_kernel(function)}
    width = _width(mixer, is_scanned=_SCAN in functions_of(mixer))
    if _CONVOLUTION in kernels:
        yield Countable((MOST_UNSIGNED_PLACES + 1) // width, KERNELS[_CONVOLUTION].distribution)
    if _SCAN in kernels:
        widest = max(width, _held_by_scan(mixer))
        yield Countable((MOST_PLACES + 1) // widest, KERNELS[_SCAN].distribution)


def _width(mixer: Any, *, is_scanned: bool) -> int:
    """Places from a token to the next one in the widest tensor that a kernel is given; Mamba-2's
    are parts of one projection."""
    if is_scanned:
        return int(mixer.intermediate_size + mixer.conv_dim + mixer.num_heads)
    return max(m.out_channels for m in mixer.modules() if isinstance(m, nn.Conv1d))


def _held_by_scan(mixer: Any) -> int:
    """Numbers for each token of the states that Mamba-2's scan holds of each chunk, or of the
    products of C and B, rounded up."""
    states = -(-mixer.intermediate_size * mixer.ssm_state_size // mixer.chunk_size)
    return int(max(states, mixer.n_groups * mixer.chunk_size))
