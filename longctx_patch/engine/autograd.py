"""Exact attention over a sequence that is cut over ranks, as an operator of autograd.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim of queries and
keys, V of values.

The operator runs a forward plan, saves (q, k, v, out, lse) and runs a backward plan. Ulysses, if
any, exchanges heads for tokens around the plan, so that the product of the two is USP (Fang and
Zhao 2024). Inside a checkpointed region that keeps attention, the recompute takes (out, lse) from
the frame, and neither the kernel nor communication runs again; if the region keeps only a share of
the tokens, both run again for the others.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.engine.key_form import AS_HEADS, AsLatents, Expansion, KeyForm
from longctx_patch.engine.selective import KeptRows, Selection, selection_of
from longctx_patch.engine.usp import ForwardResult, Saved, usp_backward, usp_forward
from longctx_patch.kernels import Score
from longctx_patch.memory.replay import Frame, current_frame
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask
from longctx_patch.transport import VirtualTransport
from longctx_patch.transport.meeting import Meeting, meet

LEAST_SCALE, MOST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Bounds of the scales that kernels, which hold them in float32, can compute with."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def _shape_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and v.shape[3] > 0
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
        f"{described}: expected q [B, L, H, D], k [B, L, G, D] and v [B, L, G, V] with H a "
        "multiple of G, of one float dtype and one device. Transpose [B, H, L, D] tensors with "
        ".transpose(1, 2)."
    )


def _value_problem(
    q: Tensor,
    sinks: Tensor | None,
    num_tokens: int | None,
    documents: Documents,
    mask: Mask,
    score: Score,
) -> str | None:
    total = documents.num_tokens
    if q.shape[0] * total < 1:
        return (
            f"q {list(q.shape)}, num_tokens={total}: an empty batch or sequence. Attention "
            "needs a token; leave empty batches out."
        )
    if num_tokens not in (None, total):
        return (
            f"num_tokens={num_tokens}, but the documents and their padding have {total} tokens: "
            "give one of them."
        )
    if mask.num_tokens != total:
        return (
            f"a mask over {mask.num_tokens} tokens for a sequence of {total}: make it for the "
            "whole sequence, padding included."
        )
    if sinks is not None and (sinks.shape != (q.shape[2],) or not sinks.is_floating_point()):
        return (
            f"sinks {list(sinks.shape)} {sinks.dtype} for {q.shape[2]} heads: give a logit for "
            "each head, in a float dtype."
        )
    return score_problem(score)


def score_problem(score: Score) -> str | None:
    """Says what is wrong with a scale or softcap."""
    if score.softcap is not None and not 0 < score.softcap < math.inf:
        return f"softcap={score.softcap}: scores are capped by a number above 0. Or give None."
    if not isinstance(score.scale, int | float) or not abs(score.scale) <= MOST_SCALE:
        return (
            f"softmax_scale={score.scale!r}: give a finite number of float32, also 0 or below, "
            "or None for the square root of the head dim, inverted."
        )
    return None


def check_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    num_tokens: int | None,
    documents: Documents,
    mask: Mask,
    score: Score,
    group: SequenceGroup,
    mask_problem: str | None,
) -> None:
    """Check the arguments of all ranks before an exchange can hang; raise on every rank or none."""
    problem = _shape_problem(q, k, v) or mask_problem
    problem = problem or _value_problem(q, sinks, num_tokens, documents, mask, score)
    if problem is not None:
        meet(group.everyone, Meeting.ATTENTION, problem=ValueError(problem))  # raises
    group.require_shards(
        Meeting.ATTENTION,
        documents,
        q.shape[1],
        f"batch {q.shape[0]}, heads {q.shape[2]}, kv heads {k.shape[2]}, "
        f"head dim {q.shape[3]}, of values {v.shape[3]}, "
        f"{q.dtype}, scale {score.scale}, softcap {score.softcap}, "
        f"{'no sinks' if sinks is None else 'sinks'}, mask {mask.checksum:08x}",
        whole="one sequence",
        fix="Cut the sequence with group.layout(num_tokens or documents).shard(x, "
        "group.group_rank, dim).",
    )
