"""Exact attention over a sequence that is cut over ranks: the public function.

Legend: B batch, L tokens of this rank, H query heads, G key-value heads, D head dim of queries and
keys, V of values.
"""

from torch import Tensor

from longctx_patch.engine.autograd import check_shards, distributed_attention, score_problem
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.kernels import Score
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, documents_mask


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
    allowed, problem = _allowed(mask, row, window)
    if check_ranks:
        check_shards(q, k, v, sinks, num_tokens, row, allowed, score, group, problem)
    elif (problem := problem or score_problem(score)) is not None:
        raise ValueError(problem)
    call = decided_call(group, row, allowed, score, CallShape.of(q, k, v), returns_lse=True)
    return distributed_attention(q, k, v, sinks, call)


def _allowed(mask: Mask | None, row: Documents, window: int | None) -> tuple[Mask, str | None]:
    """The mask of the row, and what is wrong with it, perhaps on this rank alone."""
    try:
        return row_mask(mask, row, window), None
    except ValueError as error:
        return documents_mask(row), str(error)


def _row(q: Tensor, group: SequenceGroup, num_tokens: int | None) -> Documents:
    """One document over all tokens; `check_shards` reports what is wrong with a shape."""
    length = q.shape[1] if q.ndim > 1 else 0
    return Documents.one(length * group.num_ranks if num_tokens is None else num_tokens)
