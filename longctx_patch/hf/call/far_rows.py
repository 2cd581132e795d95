"""How many tokens kernels of recurrent layers can count in transformers' own forward.

A chain copies or cuts up what a kernel can't count the places of. transformers' own forward hands
it on, and its results are wrong without an error.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from longctx_patch.engine.chain.places import MOST_PLACES, MOST_UNSIGNED_PLACES
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of, runs_kernel

_CONVOLUTION, _SCAN = "causal_conv1d_fn", "mamba2_chunk_scan"


class Countable(NamedTuple):
    """What one package's kernels can count."""

    tokens: int
    """Of all rows of a batch together."""
    package: str

    def problem(self, num_tokens: int) -> str | None:
        """Why a batch of so many tokens can't have transformers' own forward."""
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
