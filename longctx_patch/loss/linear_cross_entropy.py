"""Cross-entropy of a linear layer's outputs that are never all held at once.

At 32,768 tokens and 128,256 words the logits take 16 GiB in float32, their gradient as much again.
Here the logits of one chunk of tokens at a time are made, and at once turned into gradients of the
inputs, which are small: this is the chunked loss of Liger Kernel (arXiv 2410.10989, section 3.2);
cut cross-entropy (arXiv 2411.09009) takes the idea down into one kernel. There are three matrix
products in all, as many as with full logits; none is computed twice. Between them runs one Triton
kernel on NVIDIA GPUs (`fused_softmax.py`), and torch's operations elsewhere.

torch >= 2.13 has `F.linear_cross_entropy`. It is not used: it has no softcap and no scale, which
four supported families need, and older versions of torch don't have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.kernels.installed import runs_triton
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.loss.wide_products import add_wide_product, wide_product

CHUNK_BYTES = 2 * 2**30
"""Bytes of a chunk's float32 logits: at 128,256 words those of 4,185 tokens, which keep a GPU
busy."""


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
    _check_inputs(hidden, weight, labels, bias, softcap, chunk_bytes)
    dtype = _product_dtype(hidden)
    fused = fits_fused(hidden.device.type, dtype) and runs_triton()
    head = _Head(dtype, softcap, scale, chunk_bytes, fused)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if not torch.is_grad_enabled():
        return head.walk(hidden, weight, bias, labels, (False, False, False))[0]
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, head)
    return total


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients with respect to hidden, weight and bias; the last two in float32 or wider."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: "_Head"
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        total, ctx.gradients = head.walk(hidden, weight, bias, labels, wanted)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.scale = head.scale
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy: its gradients were handed out in "
                "the first. Compute the loss again, or take it from full logits "
                "(LongContextConfig(loss='logits'))."
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad * ctx.scale
        scaled = (
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None)


@dataclass(frozen=True)
class _Head:
    """What happens to logits, and how the work is divided: N tokens, C of them in a chunk."""

    dtype: torch.dtype
    """The dtype of the matrix products."""
    softcap: float | None
    scale: float
    chunk_bytes: int
    fused: bool
    """Whether one kernel computes losses and gradients from logits."""

    def walk(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        labels_N: Tensor,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Gradients]:
        """The sum of the losses, and its gradients without the factor `scale` (see backward).

        `wanted`: whether hidden, weight and bias need a gradient.
        """
        wide = torch.promote_types(self.dtype, torch.float32)
        wants_hidden, wants_weight, wants_bias = wanted
        total = hidden_ND.new_zeros((), dtype=wide)
        grads = (
            torch.empty_like(hidden_ND) if wants_hidden else None,
            torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None,
            torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None,
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            factors_VD = weight_VD.to(self.dtype)
            for rows in self._chunks(len(hidden_ND), len(weight_VD)):
                hidden_CD = hidden_ND[rows].to(self.dtype)
                total += self._chunk(rows, hidden_CD, factors_VD, bias, labels_N[rows], grads)
        return total, grads

    def _chunk(
        self,
        rows: slice,
        hidden_CD: Tensor,
        factors_VD: Tensor,
        bias: Tensor | None,
        labels_C: Tensor,
        grads: Gradients,
    ) -> Tensor:
        """The sum of a chunk's losses; adds to the gradients that are wanted."""
        wants_any = any(gradient is not None for gradient in grads)
        losses_C, grad_CV = self._losses(hidden_CD, factors_VD, bias, labels_C, wants_any)
        if grad_CV is not None:
            is_valid_C = labels_C != IGNORE_INDEX
            _add_gradients(grads, rows, grad_CV, hidden_CD, factors_VD, is_valid_C)
        return losses_C.sum()

    def _chunks(self, num_tokens: int, num_words: int) -> Iterator[slice]:
        """As few chunks as `chunk_bytes` allows; their sizes differ by one token at most."""
        largest = max(1, self.chunk_bytes // (4 * num_words))
        num_chunks = -(-num_tokens // largest)
        for chunk in range(num_chunks):
            yield slice(chunk * num_tokens // num_chunks, (chunk + 1) * num_tokens // num_chunks)

    def _losses(
        self,
        hidden_CD: Tensor,
        factors_VD: Tensor,
        bias: Tensor | None,
        labels_C: Tensor,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of a chunk's rows, and gradients of scaled logits in the dtype of the products."""
        logits_CV = wide_product(hidden_CD, factors_VD.t())
        if bias is not None:
            logits_CV += bias
        if self.fused:
            from longctx_patch.loss.fused_softmax import softmax_losses

            grad_dtype = self.dtype if with_gradient else None
            return softmax_losses(
                logits_CV, labels_C, softcap=self.softcap, scale=self.scale, grad_dtype=grad_dtype
            )
        self._scale_and_cap_(logits_CV)
        logs_CV = logits_CV.log_softmax(-1)
        if self.softcap is None:
            del logits_CV  # makes room
        is_valid_C = labels_C != IGNORE_INDEX
        words_C1 = labels_C.where(is_valid_C, 0)[:, None]
        logs_C1 = logs_CV.gather(1, words_C1)
        losses_C = -logs_C1[:, 0].where(is_valid_C, 0)
        if not with_gradient:
            return losses_C, None
        grad_CV = self._gradient_of_logits(logs_CV, words_C1, logs_C1)
        if self.softcap is not None:
            # d/dx c * tanh(x / c) = 1 - tanh(x / c)^2
            grad_CV.addcmul_(grad_CV, logits_CV.div_(self.softcap).square_(), value=-1)
        return losses_C, grad_CV.to(self.dtype)

    def _scale_and_cap_(self, logits_CV: Tensor) -> None:
        """Scale logits and apply the softcap, in place."""
        if self.scale != 1:
            logits_CV *= self.scale
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)

    def _gradient_of_logits(self, logs_CV: Tensor, words_C1: Tensor, logs_C1: Tensor) -> Tensor:
        """softmax - one_hot: the gradient of logits after the softcap; may overwrite `logs_CV`.

        Its dtype is that of the products, but float32 or wider if a softcap's slope is yet to be
        multiplied in.
        """
        if self.softcap is not None or self.dtype == logs_CV.dtype:
            grad_CV = logs_CV.exp_()
        else:
            grad_CV = torch.exp(logs_CV, out=torch.empty_like(logs_CV, dtype=self.dtype))
        return grad_CV.scatter_(1, words_C1, logs_C1.expm1().to(grad_CV.dtype))


def _add_gradients(
    grads: Gradients,
    rows: slice,
    grad_CV: Tensor,
    hidden_CD: Tensor,
    factors_VD: Tensor,
    is_valid_C: Tensor,
) -> None:
    """Add a chunk's gradients. Rows without a label are zeroed in small factors and products."""
    grad_hidden, grad_weight, grad_bias = grads
    is_valid_C1 = is_valid_C[:, None]
    if grad_hidden is not None:
        grad_hidden[rows] = (grad_CV @ factors_VD).where(is_valid_C1, 0)
    if grad_weight is not None:
        add_wide_product(grad_weight, grad_CV.t(), hidden_CD.where(is_valid_C1, 0))
    if grad_bias is not None:
        grad_bias += grad_CV.t() @ is_valid_C.to(grad_CV.dtype)


def fits_fused(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernel takes logits of products in this dtype; they are float32 then."""
    return device_type == "cuda" and dtype != torch.float64


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk_bytes: int,
) -> None:
    num_words = len(weight)
    biased = None if bias is None else tuple(bias.shape)
    fits = hidden.shape[:-1] == labels.shape and hidden.shape[-1:] == weight.shape[1:]
    if not fits or biased not in (None, (num_words,)):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
            f"{tuple(labels.shape)}, bias {biased}: they must be [..., D], [V, D], [...] and [V]."
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: it is a positive number, or None for no softcap.")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes}: it is a number of bytes, 1 or more.")
    if labels.device.type == "cpu":
        wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= num_words))]
        if len(wrong):
            raise ValueError(
                f"label {int(wrong[0])}: labels are from 0 to {num_words - 1}, or {IGNORE_INDEX} "
                "for tokens without loss. Check the tokenizer against the model's vocabulary."
            )
