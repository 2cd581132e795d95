"""Gradients of a linear head: made with its logits, in forward, and scaled in backward.

In forward they are those of a sum of losses. The gradient of a token's hidden state is scaled by
the gradient of its own loss, whatever that is. Those of weight and bias are sums over tokens, so
there is one sum for each segment: tokens that follow one another, and whose losses have the same
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.loss.wide_products import add_wide_product

Wanted = tuple[bool, bool, bool]
"""Three flags: hidden states, weight and bias need a gradient."""


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of a head over N tokens, C of them in a chunk, and V words."""

    segments: tuple[slice, ...]
    """Tokens of each segment."""
    hidden: Tensor | None
    """`[N, D]`, None where it is not wanted."""
    weight: list[Tensor]
    """`[V, D]` of each segment, float32 or wider; none where it is not wanted."""
    bias: list[Tensor]
    """`[V]` of each segment, as those of the weight."""

    @classmethod
    def zeros(
        cls,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
        sizes: Sequence[int],
        wide: torch.dtype,
    ) -> "HeadGradients":
        """`sizes`: tokens of each segment, N in all; those of none have no gradients."""
        wants_hidden, wants_weight, wants_bias = wanted
        edges = [0, *accumulate(size for size in sizes if size)]
        segments = tuple(slice(*edge) for edge in pairwise(edges)) or (slice(0, 0),)

        def sums(like: Tensor | None, is_wanted: bool) -> list[Tensor]:
            if like is None or not is_wanted:
                return []
            return [torch.zeros_like(like, dtype=wide) for _ in segments]

        hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        return cls(segments, hidden, sums(weight_VD, wants_weight), sums(bias, wants_bias))

    @property
    def any_wanted(self) -> bool:
        return self.hidden is not None or bool(self.weight or self.bias)

    def add(
        self,
        chunk: slice,
        grad_CV: Tensor,
        hidden_CD: Tensor,
        factors_VD: Tensor,
        labels_C: Tensor,
    ) -> None:
        """Add a chunk's gradients, from those of its logits. Tokens without a label are zeroed in
        small factors and products."""
        is_valid_C = labels_C != IGNORE_INDEX
        is_valid_C1 = is_valid_C[:, None]
        if self.hidden is not None:
            self.hidden[chunk] = (grad_CV @ factors_VD).where(is_valid_C1, 0)
        for number, segment in enumerate(self.segments):
            part = _common_part(segment, chunk)
            if part is None:
                continue
            grad_VS = grad_CV[part].t()
            if self.weight:
                hidden_SD = hidden_CD[part].where(is_valid_C1[part], 0)
                add_wide_product(self.weight[number], grad_VS, hidden_SD)
            if self.bias:
                self.bias[number].add_(grad_VS @ is_valid_C[part].to(grad_VS.dtype))

    def scaled(
        self, scale: float, of_sum: Tensor | None, of_losses: Tensor | None, labels_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden states, weight and bias, once: these are used up.

        Args:
            scale: factor of all gradients.
            of_sum: gradient of the sum of all losses, a scalar.
            of_losses: gradients of the losses, `[N]`.
            labels_N: those of `IGNORE_INDEX` have no loss.

        Raises:
            RuntimeError: losses of one segment have different gradients, and weight or bias needs
                them alike.
        """
        of_all = labels_N.new_zeros(1, dtype=torch.float32) if of_sum is None else of_sum.view(1)
        factors = [scale * of_all] * len(self.segments)
        of_tokens = scale * of_all
        if of_losses is not None:
            is_valid = labels_N != IGNORE_INDEX
            of_tokens = scale * (of_all + of_losses.where(is_valid, 0))
            if self.weight or self.bias:  # the host waits for the device
                parts = [of_tokens[part][is_valid[part]] for part in self.segments]
                factors = [_common(part) for part in parts]
        if self.hidden is not None:
            self.hidden.mul_(of_tokens[:, None])
        return self.hidden, _weighted_sum(self.weight, factors), _weighted_sum(self.bias, factors)


def _common_part(segment: slice, chunk: slice) -> slice | None:
    """The tokens of a segment within a chunk, counted from the chunk's first; None for none."""
    start, stop = max(segment.start, chunk.start), min(segment.stop, chunk.stop)
    return slice(start - chunk.start, stop - chunk.start) if start < stop else None


def _common(gradients: Tensor) -> Tensor:
    """The number that all of them are, `[1]`; 0 for none."""
    if not len(gradients):
        return gradients.new_zeros(1)
    first = gradients[:1].expand_as(gradients)
    if not bool(torch.isclose(gradients, first, rtol=0, atol=0, equal_nan=True).all()):
        raise RuntimeError(
            "the losses of tokens have different gradients, but those of the head were made for a "
            "sum of the losses, of all tokens or of each row. Take log-probabilities with "
            "gradients of their own from handle.token_log_probs(batch)."
        )
    return gradients[:1]


def _weighted_sum(parts: list[Tensor], factors: list[Tensor]) -> Tensor | None:
    """Sums the parts in the place of the first one; the others are dropped."""
    if not parts:
        return None
    for part, factor in zip(parts, factors, strict=True):
        part.mul_(factor)
    while len(parts) > 1:
        parts[0].add_(parts.pop())
    return parts[0]
