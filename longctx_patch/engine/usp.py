"""Forward and backward of one rank: Ulysses' exchanges around a plan.

Ulysses around a ring plan is USP (Fang and Zhao 2024).

Legend: B batch, L tokens of this rank, S tokens of its Ulysses group, H query heads, G key-value
heads, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.accumulate import sum_dtype
from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.executor import row_dots
from longctx_patch.engine.key_form import AS_HEADS, KeyForm
from longctx_patch.engine.ulysses import join_tokens
from longctx_patch.plans import Direction
from longctx_patch.plans.head_split import QKV, Heads


class Saved(NamedTuple):
    """The tensors that backward needs, as the plan saw them, or all heads of own tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """`[B, heads, S]` for the heads that this rank computes, even where the other tensors are
    `[B, L, ...]` of all heads."""


class ForwardResult(NamedTuple):
    saved: Saved
    """The tensors that backward needs."""
    out_BLHD: Tensor
    lse: Tensor
    """`[B, H, L]` where `call.returns_lse`, else `[B, heads, S]` as in `Saved`."""


def usp_forward(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    complete: Callable[[Saved], None] | None = None,
    form: KeyForm = AS_HEADS,
) -> ForwardResult:
    """Attention of `q` `[B, L, H, D]` over `k` and `v` `[B, L, G, D]`, with `sinks` `[H]` if any.

    Keys and values travel in their form; Ulysses exchanges heads, and needs them as such.

    `complete(saved)` may put known rows into the results before they go back.
    """
    has_ulysses = call.group.ulysses.num_ranks > 1
    if has_ulysses:
        q, k, v = call.resharder.to_heads([q, k, v], QKV).wait()
    saved = _compute_forward(call, (q, k, v), sinks, form)
    if complete is not None:
        complete(saved)
    if not has_ulysses:
        return ForwardResult(saved, saved.out, saved.lse)
    # lse has one number per head and token, so it travels as heads of dim 1.
    results = [saved.out, saved.lse.transpose(1, 2)[..., None]][: 1 + call.returns_lse]
    out, *lse_BLH1 = join_tokens(
        [call.resharder.to_tokens([result], [Heads.QUERY]) for result in results]
    )
    if lse_BLH1:
        return ForwardResult(saved, out, lse_BLH1[0][..., 0].transpose(1, 2).contiguous())
    return ForwardResult(saved, out, saved.lse)


def usp_backward(
    call: AttentionCall,
    dout: Tensor,
    saved: Saved,
    sinks: Tensor | None,
    *,
    local: bool,
    form: KeyForm = AS_HEADS,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This rank's gradients: (dq_BLHD, dk_BLGD, dv_BLGD, dsinks_H).

    `local`: `saved` has all heads of this rank's tokens, so it is exchanged once more.
    """
    has_ulysses, dsinks = call.group.ulysses.num_ranks > 1, None
    if has_ulysses:
        dout, saved = _exchange_for_backward(call, dout, saved, local)
    grads = _compute_backward(call, dout, saved, form)
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        dsinks[call.heads] = _sink_gradient(sinks[call.heads], dout, saved)
    if has_ulysses:
        grads = join_tokens([call.resharder.to_tokens(grads, QKV)])
    dq, dk, dv = grads
    return dq, dk, dv, dsinks


def _exchange_for_backward(
    call: AttentionCall, dout: Tensor, saved: Saved, local: bool
) -> tuple[Tensor, Saved]:
    """This rank's heads of dout, and of (q, k, v) and out where only own tokens were saved.

    out and dout each travel alone, since kernels want them contiguous.
    """
    to_heads, query = call.resharder.to_heads, [Heads.QUERY]
    q, k, v, out, lse = saved
    exchanges = [to_heads([q, k, v], QKV), to_heads([out], query)] if local else []
    exchanges.append(to_heads([dout], query))
    *arrived, dout = (tensor for exchange in exchanges for tensor in exchange.wait())
    return dout, Saved._make([*arrived, lse]) if local else saved


def _compute_forward(
    call: AttentionCall, qkv: Sequence[Tensor], sinks: Tensor | None, form: KeyForm
) -> Saved:
    q, k, v = qkv
    mine = None if sinks is None else sinks[call.heads]
    plan = call.plan(Direction.FORWARD)
    out, lse = call.executor.forward(plan, q, *_repeat_heads(call, k, v), mine, form=form)
    return Saved(q, k, v, out, lse)


def _compute_backward(
    call: AttentionCall, dout: Tensor, saved: Saved, form: KeyForm
) -> list[Tensor]:
    """The gradients [dq, dk, dv] of this rank's heads, in the dtype of the model."""
    q, k, v, out, lse = saved
    dq, dk, dv = call.executor.backward(
        call.plan(Direction.BACKWARD),
        dout,
        q,
        *_repeat_heads(call, k, v),
        out,
        lse,
        form=form,
        keys_as_summed=call.kv_runs is not None,
    )
    return [dq, _sum_repeated(call, dk).to(k.dtype), _sum_repeated(call, dv).to(v.dtype)]


def _sink_gradient(sinks: Tensor, dout: Tensor, saved: Saved) -> Tensor:
    """This rank's part of dsinks. A sink is a key whose value is 0, so dP is 0 there."""
    p_BHL = torch.exp(sinks.to(saved.lse.dtype)[:, None] - saved.lse)
    return -(p_BHL * row_dots(dout, saved.out).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)


def _repeat_heads(call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key-value heads where this rank's query heads don't group evenly over them."""
    runs = call.kv_runs
    if runs is None:
        return k, v

    def repeated(x: Tensor) -> Tensor:
        parts = [x[:, :, i : i + 1].expand(-1, -1, run.size, -1) for i, run in enumerate(runs)]
        return torch.cat(parts, 2)

    return repeated(k), repeated(v)


def _sum_repeated(call: AttentionCall, grad: Tensor) -> Tensor:
    """Sum the gradients of repeated heads, in float32 or wider and in a fixed order."""
    runs = call.kv_runs
    if runs is None:
        return grad
    wide = grad.to(sum_dtype(grad.dtype))
    return torch.stack([wide[:, :, slice(run.start, run.stop)].sum(2) for run in runs], 2)
