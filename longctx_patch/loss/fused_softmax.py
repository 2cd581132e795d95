"""Cross-entropy of rows of float32 logits, and its gradient in their memory: one Triton kernel.

Each program handles one row. It reads the logits once for the maximum and the sum of their
exponentials, both at the same time (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3), and
again for the gradient, which overwrites them (Liger Kernel, arXiv 2410.10989, section 3.2): 10
bytes of memory traffic per logit for a gradient of 2 bytes, and no second buffer. Scale and softcap
are applied in both reads.

Importing this needs triton, so it is imported where it is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from longctx_patch.loss.label_scores import Scores
from longctx_patch.loss.law import IGNORE_INDEX

BLOCK = tl.constexpr(4096)
"""Logits that a program holds at once, 16 per thread."""
NUM_WARPS = 8
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
IGNORED = tl.constexpr(IGNORE_INDEX)


def softmax_scores(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    softcap: float | None,
    scale: float,
    grad_dtype: torch.dtype | None,
    with_statistics: bool = False,
) -> tuple[Scores, Tensor | None]:
    """Scores of C rows, and `[C, V]` gradients of their losses with respect to `scale * logits`.

    The gradients overwrite the logits. With a `grad_dtype` of 2 bytes they fill the first half of
    each row, whose logits have 4 bytes, with a row stride of 2 * V. Rows of `IGNORE_INDEX` have
    scores and gradients of zero, whatever their logits are. A wrong label triggers the device's own
    assertion.

    Args:
        logits_CV: contiguous, float32, before scale and softcap.
        labels_C: int64.
        softcap: c of c * tanh(logits / c), after the scale.
        scale: factor of the logits.
        grad_dtype: float32, bfloat16 or float16; None: no gradient, and the logits are kept.
        with_statistics: whether entropy and top-1 hits are wanted.
    """
    assert logits_CV.is_contiguous()
    assert logits_CV.dtype == torch.float32
    num_rows, num_words = logits_CV.shape
    # The kernel could read these itself; gather asserts that labels are in the vocabulary.
    chosen_C = logits_CV.gather(1, labels_C.where(labels_C != IGNORE_INDEX, 0)[:, None])
    losses_C, entropy_C = logits_CV.new_empty(2, num_rows)
    is_top1_C = torch.empty_like(losses_C, dtype=torch.bool)
    grad_CV = logits_CV if grad_dtype is None else logits_CV.view(grad_dtype)[:, :num_words]
    with torch.cuda.device_of(logits_CV):  # Triton launches on the current device
        _softmax_row[(num_rows,)](
            logits_CV,
            grad_CV,
            chosen_C,
            labels_C.contiguous(),
            losses_C,
            entropy_C,
            is_top1_C,
            num_words,
            grad_CV.stride(0),
            float(scale if softcap is None else scale / softcap),
            float(softcap or 0),
            HAS_CAP=softcap is not None,
            HAS_GRADIENT=grad_dtype is not None,
            HAS_STATISTICS=with_statistics,
            num_warps=NUM_WARPS,
        )
    full = Scores(losses_C, entropy_C, is_top1_C, losses_C[:0])
    scores = full if with_statistics else Scores.of_losses(losses_C)
    return scores, None if grad_dtype is None else grad_CV


@triton.jit
def _softmax_row(
    logits_ptr: tl.tensor,
    grads_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    top1_ptr: tl.tensor,
    num_words: tl.tensor,
    grad_stride: tl.tensor,
    inner: tl.tensor,
    cap: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_words
    label = tl.load(labels_ptr + row).to(tl.int32)
    is_valid = label != IGNORED
    columns = tl.arange(0, BLOCK)

    # Each lane of the block has its own maximum and sum until the end of the row. As the first
    # maximum is finite, logits of -inf add nothing; a row of -inf alone gives NaN, as in torch.
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_words, BLOCK):
        words = start + columns
        logits = _row_logits(logits_ptr, words, num_words, inner, cap, HAS_CAP)
        is_larger = logits > largest
        change = tl.exp(-tl.abs(logits - largest))
        total = tl.where(is_larger, total * change + 1, total + change)
        largest = tl.where(is_larger, logits, largest)
    peak = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - peak), 0)

    chosen = _capped(tl.load(chosen_ptr + row), inner, cap, HAS_CAP)
    loss = tl.log(total) - (chosen - peak)
    tl.store(losses_ptr + row, tl.where(is_valid, loss, 0.0))

    if HAS_GRADIENT or HAS_STATISTICS:
        grads_ptr += row * grad_stride
        factor = 1 / total
        entropy = tl.zeros([BLOCK], tl.float32)
        num_before = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_words, BLOCK):
            words = start + columns
            logits = _row_logits(logits_ptr, words, num_words, inner, cap, HAS_CAP)
            probs = tl.exp(logits - peak) * factor
            if HAS_STATISTICS:
                entropy += tl.where(probs > 0, probs * (tl.log(total) - (logits - peak)), 0.0)
                is_before = (logits > chosen) | ((logits == chosen) & (words < label))
                num_before += is_before.to(tl.int32)
            if HAS_GRADIENT:
                grads = tl.where(words == label, probs - 1, probs)
                if HAS_CAP:  # d/dx c * tanh(x / c) = 1 - tanh(x / c)^2
                    tanh = logits / cap
                    grads *= 1 - tanh * tanh
                grads = tl.where(is_valid, grads, 0.0)
                # Gradient i lies on logit i, or on logit i / 2: never beyond what this block and
                # earlier ones load, but another thread may not have loaded its logits yet.
                tl.debug_barrier()
                tl.store(grads_ptr + words, grads.to(grads_ptr.dtype.element_ty), words < num_words)
        if HAS_STATISTICS:
            tl.store(entropy_ptr + row, tl.where(is_valid, tl.sum(entropy, 0), 0.0))
            tl.store(top1_ptr + row, is_valid & (tl.sum(num_before, 0) == 0))


@triton.jit
def _row_logits(
    row_ptr: tl.tensor,
    words: tl.tensor,
    num_words: tl.tensor,
    inner: tl.tensor,
    cap: tl.tensor,
    HAS_CAP: tl.constexpr,
) -> tl.tensor:
    """Logits with scale and softcap; -inf beyond the last word."""
    is_word = words < num_words
    logits = _capped(tl.load(row_ptr + words, is_word, 0.0), inner, cap, HAS_CAP)
    return tl.where(is_word, logits, float("-inf"))


@triton.jit
def _capped(
    logits: tl.tensor, inner: tl.tensor, cap: tl.tensor, HAS_CAP: tl.constexpr
) -> tl.tensor:
    if HAS_CAP:
        return cap * libdevice.tanh(inner * logits)
    else:
        return inner * logits
