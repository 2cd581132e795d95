"""Blocks that travel for keys and values, and the keys and values that a kernel gets of them.

In most models they travel as they are. In latent attention (MLA; DeepSeek-V2, section 2.1) all
heads' keys and values are expanded from one latent of each token, which has far fewer numbers. So
the latents travel, and each rank expands those of a tile where it computes the tile: in backward
once more, which turns the tile's gradients into those of its latents, and of the weights that
expand them. Those of the latents travel back; those of the weights are this rank's share, which
data parallelism sums over the ranks as it does for every weight.

Legend: B batch, M tokens of a tile, H query heads, D head dim in kernels, R numbers of a latent, E
of its rotary part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx_patch.engine.accumulate import sum_dtype

Grads = tuple[Tensor, Tensor, Tensor]
Backward = Callable[[Tensor, Tensor], Grads]
"""(dq, dk, dv) of a tile with these keys and values."""


class KeyForm(Protocol):
    """The form in which keys and values travel. `k` and `v` are tensors of a tile in that form."""

    def expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for a kernel."""

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> Grads:
        """dq of a tile, and the gradients of what travels."""


class AsHeads:
    """Keys and values travel as a kernel takes them: `[B, M, G, D]`."""

    def expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> Grads:
        return backward(k, v)


AS_HEADS = AsHeads()


class Expansion(NamedTuple):
    """The expansion of one layer's latents to keys and values."""

    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Makes keys and values `[B, M, H, any]` of latents `[B, M, 1, R]` and rotary parts
    `[B, M, 1, E]`; the same ones each time it is called."""
    weights: tuple[Tensor, ...]
    """The trained tensors that it uses."""
    value_dim: int
    """Numbers of a value's head."""


@dataclass
class AsLatents:
    """Latents and their rotary parts travel, in place of keys and values, in one run of a plan."""

    expansion: Expansion
    head_dim: int
    """The head size of kernels: smaller keys or values are padded with zeros."""
    _sums: list[Tensor | None] | None = field(default=None, init=False)
    """Gradients of the weights, in float32 or wider; None before the first tile."""

    def expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.expansion.expand(k, v)
        return self._padded(key), self._padded(value)

    def gradients(self, k: Tensor, v: Tensor, backward: Backward) -> Grads:
        latents = [x.detach().requires_grad_() for x in (k, v)]
        with torch.enable_grad():
            heads = self.expanded(*latents)
        dq, *of_heads = backward(*(x.detach() for x in heads))
        # Weights without a part in it have no gradient, here as in the stock model.
        dk, dv, *of_weights = torch.autograd.grad(
            heads, [*latents, *self.expansion.weights], of_heads, allow_unused=True
        )
        self._add(of_weights)
        return dq, dk, dv

    def weight_gradients(self) -> tuple[Tensor | None, ...]:
        """This rank's share of the weights' gradients; zeros where it computed no tile."""
        weights = self.expansion.weights
        if self._sums is None:
            return tuple(torch.zeros_like(weight) for weight in weights)
        return tuple(
            None if total is None else total.to(weight.dtype)
            for weight, total in zip(weights, self._sums, strict=True)
        )

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        if self._sums is None:
            # Copies: gradients of two weights may be one tensor, which would be added to twice.
            self._sums = [g if g is None else g.to(sum_dtype(g.dtype), copy=True) for g in grads]
            return
        for total, grad in zip(self._sums, grads, strict=True):
            if total is not None and grad is not None:
                total += grad

    def _padded(self, heads: Tensor) -> Tensor:
        missing = self.head_dim - heads.shape[3]
        return pad(heads, (0, missing)) if missing else heads
