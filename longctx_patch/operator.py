"""Exact attention over a sequence that is cut over ranks: the operator and its public function.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim.

The operator runs a forward plan, saves (q, k, v, out, lse) and runs a backward plan. Ulysses, if
any, exchanges heads for tokens around the plan, so that the product of the two is USP (Fang and
Zhao 2024). Inside a checkpointed region that keeps attention, the recompute takes (out, lse) from
the frame, and neither the kernel nor communication runs again.
"""

import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.accumulate import sum_dtype
from longctx_patch.call import AttentionCall
from longctx_patch.groups import SequenceGroup
from longctx_patch.plans import Direction
from longctx_patch.replay import current_frame
from longctx_patch.transport import VirtualTransport
from longctx_patch.ulysses import QKV, Heads

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: SequenceGroup,
    num_tokens: int | None = None,
    softmax_scale: float | None = None,
    check_ranks: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys of the whole sequence.

    Collective over the group. Every rank passes the tokens that `group.layout(num_tokens)` gives
    it, with rotary embeddings (if any) already applied for their global positions.

    Args:
        q: `[B, L, H, D]`; L may differ between ranks as the layout says, and may be 0.
        k, v: `[B, L, G, D]`, with H a multiple of G. float64, float32, bfloat16 or float16.
        group: from `make_sequence_group(config)`, or `virtual_group` in one process.
        num_tokens: length of the whole sequence; default: L times the number of ranks.
        softmax_scale: default `D ** -0.5`; the same on every rank.
        check_ranks: compare shapes, dtype and scale over the group first; it waits for all ranks,
            so a model with many layers may check once and pass False afterwards.

    Returns:
        out: `[B, L, H, D]` in q's dtype; differentiable in q, k and v.
        lse: `[B, H, L]`, natural-log sum of exponentials; float32 (float64 for float64 inputs);
            not differentiable. Second derivatives are refused by autograd.

    Raises:
        ValueError: on every rank, if shapes or dtypes disagree or don't fit the layout.

    Example (one process, so nothing is sent):
        >>> group = make_sequence_group(LongContextConfig())
        >>> out, lse = attention(*torch.randn(3, 1, 16, 4, 8), group=group)
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if check_ranks:
        _check(q, k, v, num_tokens, scale, group)
    total = q.shape[1] * group.num_ranks if num_tokens is None else num_tokens
    call = AttentionCall(group, total, scale, q.shape[2], k.shape[2], returns_lse=True)
    return distributed_attention(q, k, v, call)


def distributed_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """(out_BLHD, lse_BHL), unchecked.

    Without `call.returns_lse`, lse under Ulysses stays where it was computed: it is of this rank's
    heads and all tokens of its Ulysses group.
    """
    if q.is_cuda and q.requires_grad and isinstance(call.group.everyone, VirtualTransport):
        raise ValueError(
            "virtual ranks on CUDA can't run backward: autograd has one thread for the device, and "
            "ranks that wait for each other in it would hang. Use CPU tensors, torch.no_grad(), or "
            "real processes."
        )
    # Kernels read the head dim as contiguous and don't check.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _DistributedAttention.apply(q, k, v, call)
    return out, lse


class _DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        ctx.call = call
        frame = current_frame()
        if frame is not None and frame.replaying:
            out, lse, returned_lse = frame.take()
        else:
            saved, out, returned_lse = _run_forward(call, q, k, v)
            lse = saved[-1]
            if frame is not None:
                frame.keep(out, lse, returned_lse)
        # Checkpointing drops what the first forward saves and wants the recompute to save the same
        # shapes; the recompute has only this rank's tokens.
        ctx.local = frame is not None
        if ctx.local:
            saved = (q, k, v, out, lse)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(returned_lse)
        return out, returned_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = _run_backward(ctx.call, grads[0], ctx.saved_tensors, local=ctx.local)
        return dq, dk, dv, None


_Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _run_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[_Saved, Tensor, Tensor]:
    """((q, k, v, out, lse) as the plan saw them, this rank's out_BLHD, the lse to return)."""
    resharder, executor = call.resharder, call.executor(q)
    if resharder is None:
        out, lse = executor.forward(call.plan_for(Direction.FORWARD, q), q, k, v)
        return (q, k, v, out, lse), out, lse
    q, k, v = resharder.to_heads([q, k, v], QKV)
    plan = call.plan_for(Direction.FORWARD, q)
    out, lse = executor.forward(plan, q, *_matched(call, k, v))
    saved = (q, k, v, out, lse)
    if not call.returns_lse:
        (out,) = resharder.to_tokens([out], [Heads.QUERY])
        return saved, out, lse
    # lse is a column of every head, so it travels like one.
    lse_BLH1 = lse.transpose(1, 2)[..., None]
    lse_BLH1, out = resharder.to_tokens([lse_BLH1, out], [Heads.QUERY, Heads.QUERY])
    return saved, out, lse_BLH1[..., 0].transpose(1, 2).contiguous()


def _run_backward(
    call: AttentionCall, dout: Tensor, saved: tuple[Tensor, ...], *, local: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's tokens; `local`: saved are this rank's tokens of all heads."""
    q, k, v, out, lse = saved
    resharder, executor = call.resharder, call.executor(q)
    if resharder is not None and local:
        heads = (*QKV, Heads.QUERY, Heads.QUERY)
        q, k, v, out, dout = resharder.to_heads([q, k, v, out, dout], heads)
    elif resharder is not None:
        (dout,) = resharder.to_heads([dout], [Heads.QUERY])
    keys, values = _matched(call, k, v)
    plan = call.plan_for(Direction.BACKWARD, q)
    dq, dk, dv = executor.backward(plan, dout, q, keys, values, out, lse)
    dk, dv = _unmatched(call, dk).to(k.dtype), _unmatched(call, dv).to(v.dtype)
    if resharder is not None:
        dq, dk, dv = resharder.to_tokens([dq, dk, dv], QKV)
    return dq, dk, dv


def _matched(call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key-value heads where this rank's query heads don't group evenly over them."""
    runs = call.kv_runs
    if runs is None:
        return k, v

    def repeated(x: Tensor) -> Tensor:
        parts = [x[:, :, i : i + 1].expand(-1, -1, run.size, -1) for i, run in enumerate(runs)]
        return torch.cat(parts, 2)

    return repeated(k), repeated(v)


def _unmatched(call: AttentionCall, grad: Tensor) -> Tensor:
    """Sum the gradients of repeated heads, in float32 or wider and in a fixed order."""
    runs = call.kv_runs
    if runs is None:
        return grad
    wide = grad.to(sum_dtype(grad.dtype))
    return torch.stack([wide[:, :, slice(run.start, run.stop)].sum(2) for run in runs], 2)


def _shape_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and (q.shape[:2], q.shape[3]) == (k.shape[:2], k.shape[3])
        and k.shape[2] > 0
        and q.shape[2] % k.shape[2] == 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
        and q.device == k.device == v.device
    )
    if fits:
        return None
    described = ", ".join(
        f"{name} {list(t.shape)} {t.dtype} on {t.device}"
        for name, t in zip("qkv", (q, k, v), strict=True)
    )
    return (
        f"{described}: expected q [B, L, H, D] and k, v [B, L, G, D] with H a multiple of G, "
        "of one float dtype and one device. Transpose [B, H, L, D] tensors with .transpose(1, 2)."
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, num_tokens: int | None, scale: float, group: SequenceGroup
) -> None:
    """Compare across ranks before anything is sent that could hang; raise on every rank or none."""
    problem = _shape_problem(q, k, v)
    if problem is None and q.shape[0] * (q.shape[1] if num_tokens is None else num_tokens) < 1:
        problem = (
            f"q {list(q.shape)}, num_tokens={num_tokens}: an empty batch or sequence. Attention "
            "needs a token; leave empty batches out."
        )
    if problem is None:
        batch, length, heads, dim = q.shape
        total = length * group.num_ranks if num_tokens is None else num_tokens
        (scale_bits,) = struct.unpack("<q", struct.pack("<d", scale))
        dtype = _DTYPES.index(q.dtype)
        mine = (1, total, batch, length, heads, k.shape[2], dim, dtype, scale_bits)
    else:
        mine = (0,) * 9
    rows = group.everyone.all_gather_numbers(mine)
    if problem is not None:
        raise ValueError(problem)
    sizes = group.layout(mine[1]).sizes
    agree = all((*row[:3], *row[4:]) == (*mine[:3], *mine[4:]) for row in rows)
    if agree and tuple(row[3] for row in rows) == sizes:
        return
    table = "\n".join(_describe(rank, row) for rank, row in enumerate(rows))
    raise ValueError(
        f"the ranks of the group don't hold shards of one sequence:\n{table}\n"
        f"The {group.config.placement} layout of {mine[1]} tokens gives the ranks {list(sizes)} "
        "tokens. Cut the sequence with group.layout(num_tokens).shard(x, group.group_rank, dim)."
    )


def _describe(rank: int, row: tuple[int, ...]) -> str:
    if not row[0]:
        return f"  rank {rank}: refused its tensors; its own error says why"
    (scale,) = struct.unpack("<d", struct.pack("<q", row[8]))
    return (
        f"  rank {rank}: sequence {row[1]}, batch {row[2]}, tokens {row[3]}, heads {row[4]}, "
        f"kv heads {row[5]}, head dim {row[6]}, {_DTYPES[row[7]]}, scale {scale:g}"
    )
