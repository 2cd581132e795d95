"""Compute attention of one tile, or of several with packed rows, by one kernel call.

The rows of `call.q` are packed one after another, and those of `call.kv` likewise.

Kernels sum dq in float32 for all heads that they are given. Where that would take much of the GPU's
memory, they are given a few heads at a time: heads don't depend on each other, and on such long
rows a single head fills the GPU.
"""

import torch
from torch import Tensor

from longctx_patch.kernels.base import BackwardInputs, Kernel, Score, Segments
from longctx_patch.kernels.calls import Call, must_be_equal
from longctx_patch.sequence.layout import Interval, even_cuts

SHARE = 1 / 16
"""The share of the GPU's memory that dq in float32 may take."""
MOST_NUMBERS = 2**31 - 1
"""The most numbers of q in a call: the backward of cuDNN 9.19 was wrong for 3.2 * 10^9 on H200."""


def run_forward(
    kernel: Kernel, call: Call, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, score: Score
) -> tuple[Tensor, Tensor]:
    """(out_BLHD, lse_BHL) of the packed rows of `call.q` over those of `call.kv`."""
    form = _Form(kernel, call)
    q, k, v = form.enter(q_BLHD, k_BMGD, v_BMGD)
    out, lse = kernel.forward(q, k, v, form.segments, score)
    (out_BLHD, lse_BLH) = form.leave(out, lse.transpose(1, 2))
    return out_BLHD, lse_BLH.transpose(1, 2)


def run_backward(
    kernel: Kernel, call: Call, given: BackwardInputs, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's share of (dq_BLHD, dk_BMGD, dv_BMGD), all packed like what is given."""
    form = _Form(kernel, call)
    dout, q, k, v, out, lse_BLH = form.enter(*given[:5], given.lse.transpose(1, 2))
    given = BackwardInputs(dout, q, k, v, out, lse_BLH.transpose(1, 2))
    count = num_head_parts(given.q, given.k)
    if count == 1:
        grads = kernel.backward(given, form.segments, score)
    else:
        grads = _backward_by_heads(kernel, form.segments, score, given, count)
    dq, dk, dv = form.leave(*grads)
    return dq, dk, dv


def _of_heads(given: BackwardInputs, heads: Interval) -> BackwardInputs:
    """The part of some key-value heads, and of the query heads that see them."""
    group = given.q.shape[2] // given.k.shape[2]
    kv, query = (slice(n * heads.start, n * heads.stop) for n in (1, group))
    dout, q, out = (x[:, :, query] for x in (given.dout, given.q, given.out))
    return BackwardInputs(dout, q, given.k[:, :, kv], given.v[:, :, kv], out, given.lse[:, query])


def num_head_parts(q_BLHD: Tensor, k_BMGD: Tensor) -> int:
    """Into how many parts of whole key-value heads backward is cut; it is 1 on CPU."""
    if not q_BLHD.is_cuda:
        return 1
    total = torch.cuda.get_device_properties(q_BLHD.device).total_memory
    return parts_that_fit(q_BLHD.numel(), total, k_BMGD.shape[2])


def parts_that_fit(num_numbers: int, device_bytes: float, num_kv_heads: int) -> int:
    """The fewest parts of whole key-value heads that keep each part small enough.

    The q of a part has at most `MOST_NUMBERS`, and takes at most `SHARE` of the memory in float32.
    Where one head is larger than that, there are as many parts as heads.

    Example:
        >>> parts_that_fit(3 * 2**28, 16 * 2**30, 8)
        4
    """
    most = min(MOST_NUMBERS, int(SHARE * device_bytes / 4))
    heads_of_a_part = max(1, most * num_kv_heads // max(1, num_numbers))
    return -(-num_kv_heads // heads_of_a_part)


def _backward_by_heads(
    kernel: Kernel, segments: Segments, score: Score, given: BackwardInputs, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    like = (given.q, given.k, given.v)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
    for heads in even_cuts(given.k.shape[2], count):
        found = kernel.backward(_of_heads(given, heads), segments, score)
        places = _of_heads(given._replace(q=dq, k=dk, v=dv), heads)
        for place, part in zip((places.q, places.k, places.v), found, strict=True):
            place.copy_(part)
    return dq, dk, dv


class _Form:
    """The form in which a kernel gets a call's rows: reversed, or as rows of the batch."""

    def __init__(self, kernel: Kernel, call: Call) -> None:
        q, kv, rule = call.segments
        self.flipped = call.flipped
        self.fold = len(q) if must_be_equal(rule, kernel.traits) else 1
        self.segments = call.segments
        if self.fold > 1:
            self.segments = Segments(q[:1], kv[:1], rule)
        elif call.flipped:
            self.segments = Segments(q[::-1], kv[::-1], rule)

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Turn `[B, tokens, ...]` into what the kernel gets."""
        if self.flipped:
            tensors = tuple(x.flip(1) for x in tensors)
        if self.fold > 1:
            tensors = tuple(x.unflatten(1, (self.fold, -1)).flatten(0, 1) for x in tensors)
        return tensors

    def leave(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Turn what the kernel gave into `[B, tokens, ...]`."""
        if self.fold > 1:
            tensors = tuple(x.unflatten(0, (-1, self.fold)).flatten(1, 2) for x in tensors)
        return tuple(x.flip(1) for x in tensors) if self.flipped else tensors
