"""Cross-entropy of a linear layer's outputs that are never all held at once.

At 32,768 tokens and 128,256 words the logits take 16 GiB in float32, their gradient as much again.
Here they exist for a chunk of tokens at a time (`linear_head.py`).

torch >= 2.13 has `F.linear_cross_entropy`. It is not used: it has no softcap and no scale, which
four supported families need, and older versions of torch don't have it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.loss.label_scores import Scores
from longctx_patch.loss.linear_head import CHUNK_BYTES, LinearHead


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Sum over valid tokens of cross_entropy(softcap(scale * (hidden @ weight.T + bias)), labels).

    A scalar, float32 (float64 for float64), whose gradients are ready when it returns. Backward
    multiplies them in place by the gradient of the sum, once: going backward a second time is a
    RuntimeError. Inputs that need no gradient get none, and with gradients disabled only the sum is
    computed. The same inputs give the same bits.

    The work goes over chunks of equal size, each of as many tokens as keep its logits below
    `chunk_bytes` in float32 (one token at least). With the fused kernel a chunk takes no more
    memory, since gradients overwrite the logits. Elsewhere it takes twice that, and with a softcap
    in 16 bits two and a half times. The gradient of `weight` is summed over chunks in float32,
    which is held until backward. A bfloat16 or float16 matrix product gives float32 logits on CUDA,
    and is rounded first elsewhere, as `nn.Linear` is.

    Memory traffic per logit, with bfloat16 on CUDA: the product writes 4 bytes, the kernel reads 4
    twice and writes 2, the two products of the gradients read 2 each. That is 18 bytes, against 3
    multiply-adds for each number of a token's hidden state. A bias adds a pass of 8 bytes. With
    torch's operations the traffic is 30 bytes, and a bias adds one pass of 8, a scale one, and a
    softcap seven.

    Args:
        hidden: `[..., D]`, any float dtype; under autocast, products run in its dtype.
        weight: `[V, D]`.
        labels: `[...]` int64; rows of `IGNORE_INDEX` add no loss and have no gradient, but cost as
            much as others. Drop them before the call if there are many.
        bias: `[V]`.
        softcap: c of c * tanh(logits / c) (Gemma 2), after the scale.
        scale: factor of the logits, bias included.
        chunk_bytes: most bytes of a chunk's float32 logits.

    Raises:
        ValueError: shapes that don't fit; on CPU, labels outside the vocabulary. On other devices a
            wrong label triggers the device's own assertion, since a check would wait for it.

    Example:
        >>> hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
        >>> linear_cross_entropy(hidden, weight, torch.arange(5)).backward()
        >>> hidden.grad.shape
        torch.Size([5, 8])
    """
    head = LinearHead(softcap=softcap, scale=scale, chunk_bytes=chunk_bytes)
    return _run(hidden, weight, bias, labels, head)[0]


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
    segments: Sequence[int] | None = None,
    with_mean_logits: bool = False,
) -> Scores:
    """`linear_cross_entropy`'s loss of each token, for a loss of one's own; with the entropy of its
    words, and whether its label is the likeliest, both without gradient.

    Where weight and bias need no gradient, those of the losses may be any numbers. Else the
    gradients of weight and bias are made for sums of the losses, one for each segment and as large
    as the weight, in float32. So the gradients of the losses of one segment must be the same
    number, which backward reads on the host; those of `IGNORE_INDEX` don't count.

    Args: as those of `linear_cross_entropy`, and
        segments: how many tokens each segment has, in order; None: all are one segment.
        with_mean_logits: whether the mean of a token's logits over words is wanted.

    Returns:
        `[N]` each, for the N tokens of `hidden`; 0 where there is no label.

    Raises:
        ValueError: as `linear_cross_entropy`; segments that don't have N tokens.
        RuntimeError: in backward, for gradients of one segment's losses that differ.
    """
    head = LinearHead(
        softcap=softcap,
        scale=scale,
        chunk_bytes=chunk_bytes,
        with_statistics=True,
        with_mean_logits=with_mean_logits,
    )
    if segments is not None and sum(segments) != labels.numel():
        raise ValueError(
            f"segments of {sum(segments)} tokens for {labels.numel()} labels: each token is part "
            "of one segment."
        )
    return Scores(*_run(hidden, weight, bias, labels, head, segments)[1:])


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    head: LinearHead,
    segments: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """The sum of the losses, and the scores."""
    head.check(hidden, weight, bias, labels)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    sizes = [len(labels)] if segments is None else segments
    if not torch.is_grad_enabled():
        scores, _ = head.walk(hidden, weight, bias, labels, (False, False, False), sizes)
        return (scores.losses.sum(), *scores)
    found: tuple[Tensor, ...] = _LinearScores.apply(hidden, weight, bias, labels, head, sizes)
    return found


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: LinearHead,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[:3]
        scores, ctx.gradients = head.walk(hidden, weight, bias, labels, wanted, sizes)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.scale = head.scale
        ctx.mark_non_differentiable(*scores[1:])
        ctx.save_for_backward(labels)
        return (scores.losses.sum(), *scores)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_sum: Tensor | None, of_losses: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy: its gradients were handed out in "
                "the first. Compute the loss again, or take it from full logits "
                "(LongContextConfig(loss='logits'))."
            )
        gradients, ctx.gradients = ctx.gradients, None
        (labels,) = ctx.saved_tensors
        scaled = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(
                gradients.scaled(ctx.scale, of_sum, of_losses, labels), ctx.dtypes, strict=True
            )
        )
        return (*scaled, None, None, None)
