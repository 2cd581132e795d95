"""Exact attention over a sequence that is cut over ranks: the operator and its public function.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim.

The operator runs a forward plan, saves (q, k, v, out, lse) and runs a backward plan. Ulysses, if
any, exchanges heads for tokens around the plan, so that the product of the two is USP (Fang and
Zhao 2024). Inside a checkpointed region that keeps attention, the recompute takes (out, lse) from
the frame, and neither the kernel nor communication runs again.
"""

from typing import Any

import torch
from torch import Tensor

from longctx_patch.call import QKV, AttentionCall
from longctx_patch.groups import SequenceGroup
from longctx_patch.plans import Direction
from longctx_patch.replay import current_frame
from longctx_patch.transport import VirtualTransport
from longctx_patch.ulysses import Heads


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: SequenceGroup,
    num_tokens: int | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys of the whole sequence.

    Collective over the group. Every rank passes the tokens that `group.layout(num_tokens)` gives
    it, with rotary embeddings (if any) already applied for their global positions.

    Args:
        q: `[B, L, H, D]`; L may differ between ranks as the layout says, and may be 0.
        k, v: `[B, L, G, D]`, with H a multiple of G. float64, float32, bfloat16 or float16.
        group: from `make_sequence_group(config)`, or `virtual_group` in one process.
        num_tokens: length of the whole sequence; default: L times the number of ranks.
        softmax_scale: default `D ** -0.5`.

    Returns:
        out: `[B, L, H, D]` in q's dtype; differentiable in q, k and v.
        lse: `[B, H, L]`, natural-log sum of exponentials; float32 (float64 for float64 inputs);
            not differentiable.

    Raises:
        ValueError: on every rank, if shapes or dtypes disagree or don't fit the layout.

    Example (one process, so nothing is sent):
        >>> group = make_sequence_group(LongContextConfig())
        >>> out, lse = attention(*torch.randn(3, 1, 16, 4, 8), group=group)
    """
    total = _check(q, k, v, num_tokens, group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    call = AttentionCall(group, total, scale, q.shape[2], k.shape[2])
    out, lse = distributed_attention(q, k, v, call)
    if call.resharder is not None:
        # The operator leaves lse with the heads; it is a per-head column, so it travels like one.
        (lse_BLH1,) = call.resharder.to_tokens(
            [lse.detach().transpose(1, 2)[..., None]], [Heads.QUERY]
        )
        lse = lse_BLH1[..., 0].transpose(1, 2).contiguous()
    return out, lse


def distributed_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """(out_BLHD, lse), unchecked.

    Under Ulysses lse is of this rank's heads and all tokens of its Ulysses group.
    """
    if q.is_cuda and q.requires_grad and isinstance(call.group.everyone, VirtualTransport):
        raise ValueError(
            "virtual ranks on CUDA can't run backward: autograd has one thread for the device, and "
            "ranks that wait for each other in it would hang. Use CPU tensors, torch.no_grad(), or "
            "real processes."
        )
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
            out, lse = frame.take()
        else:
            saved, out = _run_forward(call, q, k, v)
            lse = saved[-1]
            if frame is not None:
                frame.keep(out, lse)
        # Checkpointing drops what the first forward saves and wants the recompute to save the same
        # shapes; the recompute has only this rank's tokens.
        ctx.local = frame is not None
        if ctx.local:
            saved = (q, k, v, out, lse)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = _run_backward(ctx.call, grads[0], ctx.saved_tensors, local=ctx.local)
        return dq, dk, dv, None


_Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _run_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[_Saved, Tensor]:
    """((q, k, v, out, lse) as the plan saw them, this rank's out_BLHD)."""
    resharder, executor = call.resharder, call.executor(q)
    if resharder is not None:
        q, k, v = resharder.to_heads([q, k, v], QKV)
    out, lse = executor.forward(call.plan(Direction.FORWARD), q, *_matched(call, k, v))
    saved = (q, k, v, out, lse)
    if resharder is not None:
        (out,) = resharder.to_tokens([out], [Heads.QUERY])
    return saved, out


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
    plan = call.plan(Direction.BACKWARD)
    dq, dk, dv = executor.backward(plan, dout, q, keys, values, out, lse)
    dk, dv = _unmatched(call, dk, like=k), _unmatched(call, dv, like=v)
    if resharder is not None:
        dq, dk, dv = resharder.to_tokens([dq, dk, dv], QKV)
    return dq, dk, dv


def _matched(call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key-value heads where this rank's query heads don't group evenly over them."""
    index = call.split.kv_index(call.group.ulysses.group_rank)
    if index is None:
        return k, v
    return k[:, :, index], v[:, :, index]


def _unmatched(call: AttentionCall, grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of repeated heads, in float32."""
    index = call.split.kv_index(call.group.ulysses.group_rank)
    if index is None:
        return grad
    total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    where = torch.tensor(index, device=grad.device)
    return total.index_add_(2, where, grad.to(total.dtype)).to(like.dtype)


def _shape_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and (q.shape[:2], q.shape[3]) == (k.shape[:2], k.shape[3])
        and q.shape[2] % k.shape[2] == 0
        and q.dtype == k.dtype == v.dtype
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
        "of one dtype and device. Transpose [B, H, L, D] tensors with .transpose(1, 2)."
    )


def _check(q: Tensor, k: Tensor, v: Tensor, num_tokens: int | None, group: SequenceGroup) -> int:
    """Compare across ranks before anything is sent that could hang; the sequence's length.

    Raises on every rank or on none.
    """
    problem = _shape_problem(q, k, v)
    if problem is None:
        batch, length, heads, dim = q.shape
        total = length * group.num_ranks if num_tokens is None else num_tokens
        mine = (1, total, batch, length, heads, k.shape[2], dim, q.itemsize)
    else:
        mine = (0,) * 8
    rows = group.everyone.all_gather_numbers(mine)
    if problem is not None:
        raise ValueError(problem)
    sizes = group.layout(mine[1]).sizes
    agree = all((*row[:3], *row[4:]) == (*mine[:3], *mine[4:]) for row in rows)
    if agree and tuple(row[3] for row in rows) == sizes:
        return mine[1]
    table = "\n".join(_describe(rank, row) for rank, row in enumerate(rows))
    raise ValueError(
        f"the ranks of the group don't hold shards of one sequence:\n{table}\n"
        f"The {group.config.layout} layout of {mine[1]} tokens gives the ranks {list(sizes)} "
        "tokens. Cut the sequence with group.layout(num_tokens).shard(x, group.group_rank, dim)."
    )


def _describe(rank: int, row: tuple[int, ...]) -> str:
    if not row[0]:
        return f"  rank {rank}: refused its tensors; its own error says why"
    return (
        f"  rank {rank}: sequence {row[1]}, batch {row[2]}, tokens {row[3]}, heads {row[4]}, "
        f"kv heads {row[5]}, head dim {row[6]}, {row[7]} bytes per number"
    )
