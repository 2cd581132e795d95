"""Exact attention over a sequence that is cut over ranks: the public function.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim of queries and
keys, V of values.
"""

import math

import torch
from torch import Tensor

from longctx_patch.engine.autograd import MOST_SCALE, distributed_attention
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.kernels import Score
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask
from longctx_patch.transport.meeting import Meeting, tried

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: SequenceGroup,
    num_tokens: int | None = None,
    documents: Documents | None = None,
    window: int | None = None,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    check_ranks: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of the whole sequence; causal by default.

    Collective over the group. Every rank passes the tokens that `group.layout(num_tokens)` (or
    `group.layout(documents)`) gives it, with rotary embeddings (if any) already applied: token `i`
    of this rank has position `group.layout(num_tokens).positions(group.group_rank)[i]` in the row,
    and `documents.positions(...)` of these counts from the start of each document.

    Args:
        q: `[B, L, H, D]`; L may differ between ranks as the layout says, and may be 0.
        k: `[B, L, G, D]`, with H a multiple of G.
        v: `[B, L, G, V]`, of the dtype of q and k: float64, float32, bfloat16 or float16. Where V
            is not D, as in latent attention, the smaller is padded with zeros, so messages and
            kernels take the larger for both.
        group: from `make_sequence_group(config)`, or `virtual_group` in one process.
        num_tokens: length of the whole sequence; default: L times the number of ranks.
        documents: those of a packed row, the same for all B rows: tokens attend within their own.
        window: each token sees the last `window` keys only, itself included. Later keys that a
            `mask` allows stay.
        mask: any `longctx_patch.Mask` over the whole sequence, in place of the causal one;
            `documents` and `window` restrict it further.
        sinks: `[H]`, differentiable: a logit of each head that joins the softmax of every row and
            has no value (gpt-oss).
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        softmax_scale: any finite number, default `D ** -0.5`; the same on every rank. Below 0 it
            turns the order of keys around, and 0 weighs all that are seen alike.
        check_ranks: compare shapes, dtype and mask over the group first; it waits for all ranks,
            so a model with many layers may check once and pass False afterwards.

    Returns:
        out: `[B, L, H, V]` in q's dtype; differentiable in q, k, v, sinks. 0 where nothing is seen.
        lse: `[B, H, L]`, natural-log sum of exponentials, the sink's included; float32 (float64 for
            float64 inputs); not differentiable. Second derivatives are refused by autograd.

    Raises:
        ValueError: on every rank, if shapes, dtypes or masks disagree or don't fit the layout.

    Example (one process, so nothing is sent):
        >>> group = make_sequence_group(LongContextConfig())
        >>> out, lse = attention(*torch.randn(3, 1, 16, 4, 8), group=group)
    """
    score = Score(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    row = _row(q, group, num_tokens) if documents is None else documents

    def checked() -> Mask:
        _check_shapes(q, k, v)
        found = row_mask(mask, row, window)
        _check_values(q, sinks, num_tokens, row, found, score)
        return found

    if not check_ranks:
        allowed = checked()
    else:
        allowed = tried(group.everyone, Meeting.ATTENTION, checked)
        group.require_shards(
            Meeting.ATTENTION,
            row,
            q.shape[1],
            f"batch {q.shape[0]}, heads {q.shape[2]}, kv heads {k.shape[2]}, "
            f"head dim {q.shape[3]}, of values {v.shape[3]}, "
            f"{q.dtype}, scale {score.scale}, softcap {score.softcap}, "
            f"{'no sinks' if sinks is None else 'sinks'}, mask {allowed.checksum:08x}",
            whole="one sequence",
            fix="Cut the sequence with group.layout(num_tokens or documents).shard(x, "
            "group.group_rank, dim).",
        )
    call = decided_call(group, row, allowed, score, CallShape.of(q, k, v), returns_lse=True)
    return distributed_attention(q, k, v, sinks, call)


def _row(q: Tensor, group: SequenceGroup, num_tokens: int | None) -> Documents:
    """One document over all tokens; `_check_shapes` reports what is wrong with a shape."""
    length = q.shape[1] if q.ndim > 1 else 0
    return Documents.one(length * group.num_ranks if num_tokens is None else num_tokens)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
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
        return
    described = ", ".join(
        f"{name} {list(t.shape)} {t.dtype} on {t.device}"
        for name, t in zip("qkv", (q, k, v), strict=True)
    )
    raise ValueError(
        f"{described}: expected q [B, L, H, D], k [B, L, G, D] and v [B, L, G, V] with H a "
        "multiple of G, of one float dtype and one device. Transpose [B, H, L, D] tensors with "
        ".transpose(1, 2)."
    )


def _check_values(
    q: Tensor,
    sinks: Tensor | None,
    num_tokens: int | None,
    documents: Documents,
    mask: Mask,
    score: Score,
) -> None:
    total = documents.num_tokens
    if q.shape[0] * total < 1:
        raise ValueError(
            f"q {list(q.shape)}, num_tokens={total}: an empty batch or sequence. Attention "
            "needs a token; leave empty batches out."
        )
    if num_tokens not in (None, total):
        raise ValueError(
            f"num_tokens={num_tokens}, but the documents and their padding have {total} tokens: "
            "give one of them."
        )
    if mask.num_tokens != total:
        raise ValueError(
            f"a mask over {mask.num_tokens} tokens for a sequence of {total}: make it for the "
            "whole sequence, padding included."
        )
    if sinks is not None and (sinks.shape != (q.shape[2],) or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks {list(sinks.shape)} {sinks.dtype} for {q.shape[2]} heads: give a logit for "
            "each head, in a float dtype."
        )
    if score.softcap is not None and not 0 < score.softcap < math.inf:
        raise ValueError(
            f"softcap={score.softcap}: scores are capped by a number above 0. Or give None."
        )
    if not isinstance(score.scale, int | float) or not abs(score.scale) <= MOST_SCALE:
        raise ValueError(
            f"softmax_scale={score.scale!r}: give a finite number of float32, also 0 or below, "
            "or None for the square root of the head dim, inverted."
        )
