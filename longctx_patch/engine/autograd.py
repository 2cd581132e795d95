"""Exact attention over a sequence that is cut over ranks, as an operator of autograd.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim of queries and
keys, V of values.

The operator runs a forward plan, saves (q, k, v, out, lse) and runs a backward plan. Ulysses, if
any, exchanges heads for tokens around the plan, so that the product of the two is USP (Fang and
Zhao 2024). Inside a checkpointed region that keeps attention, the recompute takes (out, lse) from
the frame, and neither the kernel nor communication runs again; if the region keeps only a share of
the tokens, both run again for the others.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.key_form import AS_HEADS, AsLatents, Expansion, KeyForm
from longctx_patch.engine.selective import KeptRows, Selection, selection_of
from longctx_patch.engine.usp import ForwardResult, Saved, usp_backward, usp_forward
from longctx_patch.memory.replay import Frame, current_frame
from longctx_patch.transport import VirtualTransport

LEAST_SCALE, MOST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Bounds of the scales that kernels, which hold them in float32, can compute with."""


def distributed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    call: AttentionCall,
    *,
    layer: int | None = None,
    expansion: Expansion | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a call and return (out_BLHV, lse_BHL); shapes are not checked.

    Plans, messages and kernels have one head dim, so where D and V differ the smaller is padded
    with zeros: they add nothing to scores, and the columns that they add to `out` are cut off.

    With an `expansion` k and v are latents `[B, L, 1, R]` and their rotary parts `[B, L, 1, E]`,
    for a call whose shape has a `latent_dim`.

    `layer` is the number of the model's layer, which the record of a run that hangs names.

    Without `call.returns_lse`, lse under Ulysses is as it was computed: of this rank's heads and
    all tokens of its Ulysses group.
    """
    if q.is_cuda and q.requires_grad and isinstance(call.group.everyone, VirtualTransport):
        raise ValueError(
            "virtual ranks on CUDA can't run backward: autograd has one thread for the device, and "
            "ranks that wait for each other in it would hang. Use CPU tensors, torch.no_grad(), or "
            "real processes."
        )
    q, call = _with_scale_above_zero(q, call)
    width, value_dim, weights = call.shape.head_dim, v.shape[3], tuple[Tensor, ...]()
    widths = (width, width, width)
    if expansion is not None:  # heads are padded where latents are expanded
        value_dim, weights, widths = expansion.value_dim, expansion.weights, (width, 0, 0)
    q, k, v = (_as_wide(x, least) for x, least in zip((q, k, v), widths, strict=True))
    out, lse = _DistributedAttention.apply(q, k, v, sinks, call, layer, expansion, *weights)
    return (out if value_dim == out.shape[3] else out[..., :value_dim]), lse


def _as_wide(x: Tensor, least: int) -> Tensor:
    """A tensor `[B, L, heads, any]`, padded with zeros to `least` numbers where it has fewer."""
    if x.shape[3] < least:
        return torch.nn.functional.pad(x, (0, least - x.shape[3]))
    # Kernels read the head dim as contiguous and don't check.
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_scale_above_zero(q: Tensor, call: AttentionCall) -> tuple[Tensor, AttentionCall]:
    """The same scores from a scale above 0, which is all that kernels take.

    They scale after they have masked and taken the maximum, so that -inf would become inf or NaN.
    A negative scale is that of -q, bit by bit; a scale of 0 is any scale of a q of zeros, and so is
    one that float32 would round to 0.
    """
    scale = call.score.scale
    if scale >= LEAST_SCALE:
        return q, call
    is_zero = abs(scale) < LEAST_SCALE
    score = call.score._replace(scale=1.0 if is_zero else -scale)
    return (q * 0.0 if is_zero else -q), replace(call, score=score)


class _DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: AttentionCall,
        layer: int | None,
        expansion: Expansion | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.layer, ctx.expansion = call, layer, expansion
        form = _form(call, expansion)
        frame = current_frame()
        selection = None if frame is None else selection_of(call, frame.share)
        # Checkpointing wants the recompute to save the same shapes as the first forward, whose
        # tensors it drops. A recompute that runs nothing again has only this rank's tokens.
        ctx.local = frame is not None and selection is None
        with torch.autocast(q.device.type, enabled=False):  # kernels choose their dtypes
            if frame is None:
                saved, out, returned_lse = usp_forward(call, q, k, v, sinks, form=form)
            elif selection is None:
                out, lse, returned_lse = _kept_whole(frame, call, q, k, v, sinks, form)
                saved = Saved(q, k, v, out, lse)
            else:
                saved, out, returned_lse = _kept_partly(frame, selection, q, k, v, sinks, form)
        ctx.num_weights = len(weights)  # saved, so that autograd sees it if one is changed
        ctx.save_for_backward(sinks, *weights, *saved)
        ctx.mark_non_differentiable(returned_lse)
        return out, returned_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *flat = ctx.saved_tensors
        saved = Saved(*flat[ctx.num_weights :])
        with torch.autocast(grads[0].device.type, enabled=False):
            form = _form(ctx.call, ctx.expansion)
            gradients = usp_backward(ctx.call, grads[0], saved, sinks, local=ctx.local, form=form)
            of_weights = form.weight_gradients() if isinstance(form, AsLatents) else ()
        return *gradients, None, None, None, *of_weights


def _form(call: AttentionCall, expansion: Expansion | None) -> KeyForm:
    """The form in which keys and values travel in one run of a call's plan."""
    return AS_HEADS if expansion is None else AsLatents(expansion, call.shape.head_dim)


def _kept_whole(
    frame: Frame,
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    form: KeyForm,
) -> tuple[Tensor, ...]:
    """(out, lse, lse to return): computed and kept at first, taken from the frame in a replay."""
    if frame.replaying:
        return frame.take()
    saved, out, returned_lse = usp_forward(call, q, k, v, sinks, form=form)
    frame.keep(out, saved.lse, returned_lse)
    return out, saved.lse, returned_lse


def _kept_partly(
    frame: Frame,
    selection: Selection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    form: KeyForm,
) -> ForwardResult:
    """The first time all rows are computed and some kept; a recompute computes the others again."""
    if not frame.replaying:
        selection.prepare()
        result = usp_forward(selection.call, q, k, v, sinks, form=form)
        frame.keep(*selection.kept(result.saved.out, result.saved.lse))
        return result
    kept = KeptRows(*frame.take())

    def complete(saved: Saved) -> None:
        selection.complete(saved.out, saved.lse, kept)

    return usp_forward(selection.early, q, k, v, sinks, complete, form)
