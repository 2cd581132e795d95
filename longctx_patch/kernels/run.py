"""Run one kernel call on packed rows: `call.q` one after another, and `call.kv` likewise."""

from torch import Tensor

from longctx_patch.kernels.base import Kernel, Score, Segments
from longctx_patch.kernels.calls import Call, must_be_equal


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
    lse = lse_BLH.transpose(1, 2)
    dq, dk, dv = form.leave(*kernel.backward(dout, q, k, v, out, lse, form.segments, score))
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
