"""Run one kernel call on packed rows: `call.q` one after another, and `call.kv` likewise.

Kernels sum dq in float32, for all the heads that they are given. Where that takes much of the GPU's
memory they are given some heads after the other: heads don't depend on each other, and rows so long
fill the GPU with one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.base import Kernel, Score, Segments
from longctx_patch.kernels.calls import Call, must_be_equal
from longctx_patch.sequence.layout import Interval, even_cuts

SHARE = 1 / 16
"""Of the GPU's memory, that dq in float32 may take."""
MOST_NUMBERS = 2**31 - 1
"""Of q: cuDNN's backward was wrong for more (9.19 on H200, 3.2 * 10^9 numbers)."""


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
    kernel: Kernel,
    call: Call,
    dout_BLHD: Tensor,
    q_BLHD: Tensor,
    k_BMGD: Tensor,
    v_BMGD: Tensor,
    out_BLHD: Tensor,
    lse_BHL: Tensor,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's share of (dq_BLHD, dk_BMGD, dv_BMGD), all packed."""
    form = _Form(kernel, call)
    dout, q, k, v, out = form.enter(dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD)
    (lse_BLH,) = form.enter(lse_BHL.transpose(1, 2))
    tensors = _Backward(dout, q, k, v, out, lse_BLH.transpose(1, 2))
    count = num_head_parts(q, k)
    if count == 1:
        grads = kernel.backward(*tensors, form.segments, score)
    else:
        grads = _backward_by_heads(kernel, form.segments, score, tensors, count)
    dq, dk, dv = form.leave(*grads)
    return dq, dk, dv


class _Backward(NamedTuple):
    """What a kernel's backward is given."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of_heads(self, heads: Interval) -> "_Backward":
        """Of some key-value heads, and the query heads that see them."""
        group = self.q.shape[2] // self.k.shape[2]
        kv, query = (slice(n * heads.start, n * heads.stop) for n in (1, group))
        dout, q, out = (x[:, :, query] for x in (self.dout, self.q, self.out))
        return _Backward(dout, q, self.k[:, :, kv], self.v[:, :, kv], out, self.lse[:, query])


def num_head_parts(q_BLHD: Tensor, k_BMGD: Tensor) -> int:
    """Of whole key-value heads, in which backward is computed; 1 on CPU."""
    if not q_BLHD.is_cuda:
        return 1
    total = torch.cuda.get_device_properties(q_BLHD.device).total_memory
    return parts_that_fit(q_BLHD.numel(), total, k_BMGD.shape[2])


def parts_that_fit(num_numbers: int, device_bytes: float, num_kv_heads: int) -> int:
    """The fewest parts of whole key-value heads of which each has at most `MOST_NUMBERS` of q, and
    at most `SHARE` of the memory in float32; as many as there are heads if one has more.

    Example:
        >>> parts_that_fit(3 * 2**28, 16 * 2**30, 8)
        4
    """
    most = min(MOST_NUMBERS, int(SHARE * device_bytes / 4))
    heads_of_a_part = max(1, most * num_kv_heads // max(1, num_numbers))
    return -(-num_kv_heads // heads_of_a_part)


def _backward_by_heads(
    kernel: Kernel, segments: Segments, score: Score, tensors: _Backward, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    like = (tensors.q, tensors.k, tensors.v)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
    for heads in even_cuts(tensors.k.shape[2], count):
        found = kernel.backward(*tensors.of_heads(heads), segments, score)
        places = tensors._replace(q=dq, k=dk, v=dv).of_heads(heads)
        for place, part in zip((places.q, places.k, places.v), found, strict=True):
            place.copy_(part)
    return dq, dk, dv


class _Form:
    """How a call's rows are handed to the kernel: in reverse order, as rows of the batch."""

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
        """From `[B, tokens, ...]` to what the kernel gets."""
        if self.flipped:
            tensors = tuple(x.flip(1) for x in tensors)
        if self.fold > 1:
            tensors = tuple(x.unflatten(1, (self.fold, -1)).flatten(0, 1) for x in tensors)
        return tensors

    def leave(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From what the kernel gave to `[B, tokens, ...]`."""
        if self.fold > 1:
            tensors = tuple(x.unflatten(0, (-1, self.fold)).flatten(1, 2) for x in tensors)
        return tuple(x.flip(1) for x in tensors) if self.flipped else tensors
