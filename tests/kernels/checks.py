"""Compare a kernel, alone and through the calls of pieces, with attention over a whole table."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from longctx_patch.kernels import (
    BackwardInputs,
    Kernel,
    Score,
    Segments,
    calls_of,
    run_backward,
    run_forward,
)
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import Piece, Tile
from tests.kernels.dense import Answer, Problem, answer
from tests.reference import relative_error


def takes(kernel: Kernel, segments: Segments, score: Score) -> bool:
    n, m, rule = segments
    if isinstance(rule, Tile):
        needs = [kernel.traits.tiles]
    else:
        is_simple = rule == FULL_WINDOW or (rule == CAUSAL_WINDOW and n == m)
        needs = [is_simple or kernel.traits.windows, len(n) == 1 or kernel.traits.segments]
    return all(needs) and (score.softcap is None or kernel.traits.softcap)


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> None:
    """Check shapes and the relative error of every tensor."""
    assert [part.shape for part in found] == [right.shape for right in wanted]
    errors = [relative_error(part, right) for part, right in zip(found, wanted, strict=True)]
    assert max(errors) < bound, errors


def saving_nothing() -> saved_tensors_hooks:
    """Within the context nothing may be saved for a backward of the caller's, such as a layer's
    whose recompute leaves the kernel out."""

    def pack(tensor: Tensor) -> Tensor:
        raise AssertionError(f"the caller's hooks saw {tuple(tensor.shape)}")

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def check_kernel(
    kernel: Kernel, segments: Segments, score: Score, given: Problem, want: Answer, bound: float
) -> None:
    q, k, v, dout = given[:4]
    with saving_nothing():
        out, lse = kernel.forward(q, k, v, segments, score)
    assert out.dtype == q.dtype
    assert lse.dtype == _lse_dtype(q)
    check((out, lse), (want.own_out, want.own_lse), bound)
    global_out, global_lse = want.out.to(out.dtype), want.lse.to(lse.dtype)
    inputs = BackwardInputs(dout, q, k, v, global_out, global_lse)
    with saving_nothing():
        grads = kernel.backward(inputs, segments, score)
    assert all(grad.dtype == q.dtype for grad in grads)
    check(grads, (want.dq, want.dk, want.dv), bound)


def check_calls(
    kernel: Kernel,
    pieces: tuple[Piece, ...],
    score: Score,
    make: Callable[[int, int], Problem],
    bound: float,
) -> None:
    """Check the outputs of all calls, merged by lse, and the sums of their gradients."""
    size = max(piece.q.stop for piece in pieces), max(piece.kv.stop for piece in pieces)
    table = np.zeros(size, dtype=np.bool_)
    for piece in pieces:
        table[slice(*piece.q), slice(*piece.kv)] |= piece.bits()
    given = make(*size)
    want = answer(given, torch.from_numpy(table), score)
    q, k, v, dout = given[:4]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v))
    lse = torch.full_like(want.lse, -math.inf)
    rows = [dout, q, want.out.to(q.dtype), want.lse.to(_lse_dtype(q)).transpose(1, 2)]
    for call in calls_of(pieces, kernel.traits):
        own_dout, own_q, own_out, own_lse = (_packed(x, call.q) for x in rows)
        keys = _packed(k, call.kv), _packed(v, call.kv)
        part, part_lse = run_forward(kernel, call, own_q, *keys, score)
        at, columns = (_index(i).to(q.device) for i in (call.q, call.kv))
        out[:, at] += part * part_lse.double().exp().transpose(1, 2)[..., None]
        lse[:, :, at] = torch.logaddexp(lse[:, :, at], part_lse.double())
        inputs = BackwardInputs(own_dout, own_q, *keys, own_out, own_lse.transpose(1, 2))
        found = run_backward(kernel, call, inputs, score)
        for total, rows_of, grad in zip((dq, dk, dv), (at, columns, columns), found, strict=True):
            total.index_add_(1, rows_of, grad.double())
    seeing = torch.from_numpy(table.any(1)).to(q.device)
    lse, out, dq = lse[:, :, seeing], out[:, seeing], dq[:, seeing]
    check(
        (out / lse.exp().transpose(1, 2)[..., None], lse, dq, dk, dv),
        (want.own_out[:, seeing], want.own_lse[:, :, seeing], want.dq[:, seeing], want.dk, want.dv),
        bound,
    )


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _packed(x: Tensor, intervals: tuple[Interval, ...]) -> Tensor:
    return torch.cat([x[:, slice(*i)] for i in intervals], 1)


def _index(intervals: tuple[Interval, ...]) -> Tensor:
    return torch.cat([torch.arange(*i) for i in intervals])
