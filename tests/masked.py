"""Masks of every kind with the dense table of each, written from its definition."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import Mask, bidirectional, block_sparse, function_mask, prefix_lm

Table = NDArray[np.bool_]


class Masked(NamedTuple):
    """Arguments of `attention` and the table of the pairs that they allow."""

    name: str
    documents: Documents
    window: int | None
    mask: Mask | None
    table: Table


def masks_of(num_tokens: int) -> Iterator[Masked]:
    """Every kind of mask. Documents end at and near the edges of quarters; some have one token."""
    n, quarter = num_tokens, num_tokens // 4
    one = Documents.one(n)
    lengths = (quarter - 1, 1, 1, n // 2, 1, 3)
    packed = Documents(lengths, n)
    tokens = np.arange(n, dtype=np.int64)
    q, k = tokens[:, None], tokens[None, :]
    causal = k <= q
    inside = same_document(lengths, n)
    yield Masked("documents", packed, None, None, causal & inside)
    tree = Documents(lengths, n, (-1, 0, -1, 1, 0, 3))
    below, further = causal & seen(tree), distances(tree)
    yield Masked("branches", tree, None, None, below)
    yield Masked("branches in windows", tree, 5, None, below & (further < 5))
    yield Masked("branches in long windows", tree, quarter + 1, None, below & (further <= quarter))
    yield Masked("window 1", one, 1, None, q == k)
    yield Masked("window", one, 5, None, causal & (k > q - 5))
    yield Masked("window beyond a shard", one, quarter + 3, None, causal & (k > q - quarter - 3))
    yield Masked("documents in windows", packed, 3, None, causal & inside & (k > q - 3))
    yield Masked("bidirectional", one, None, bidirectional(n), causal | True)
    yield Masked("both ways in documents", packed, None, bidirectional(n), inside)
    yield Masked("prefix", one, None, prefix_lm(n, n // 3), causal | (k < n // 3))
    size = max(5, n // 12)
    blocks = np.random.default_rng(0).random((-(-n // size),) * 2) > 0.6
    allowed = blocks[q // size, k // size]
    yield Masked("blocks", one, None, block_sparse(n, blocks, size), causal & allowed)
    sparse = block_sparse(n, blocks, size, is_causal=False)
    yield Masked("blocks both ways", one, None, sparse, allowed)
    yield Masked("blocks in documents", packed, None, sparse, allowed & inside)

    def rule(q: NDArray[np.int64], k: NDArray[np.int64]) -> Table:
        return (q * 7 + k * 3) % 5 < 2

    yield Masked("function", one, None, function_mask(n, rule, block_size=8), rule(q, k))


def same_document(lengths: tuple[int, ...], num_tokens: int) -> Table:
    owner = np.full(num_tokens, -1)
    start = 0
    for number, length in enumerate(lengths):
        owner[start : start + length] = number
        start += length
    return (owner[:, None] == owner[None, :]) & (owner >= 0)[:, None]


def texts_of(row: Documents) -> list[str]:
    """Each token with all that is before it in its own row, if branches were written out as rows:
    a letter for each document. Padding has none."""
    whole: list[str] = []
    found: list[str] = []
    for number, length in enumerate(row.lengths):
        parent = row.parents[number] if row.parents else -1
        before, letter = whole[parent] if parent >= 0 else "", chr(ord("A") + number)
        found += [before + letter * (place + 1) for place in range(length)]
        whole.append(before + letter * length)
    return found + [""] * (row.num_tokens - len(found))


def seen(row: Documents) -> Table:
    """Says whether what is before a token begins with the other one's text, or they share a
    document."""
    texts = texts_of(row)
    begins = [[bool(k) and q.startswith(k) for k in texts] for q in texts]
    return np.array(begins).reshape(len(texts), -1) | same_document(row.lengths, row.num_tokens)


def distances(row: Documents) -> NDArray[np.int64]:
    """How many tokens further a query (rows) is in its text than a key."""
    places = np.array([len(text) for text in texts_of(row)], dtype=np.int64)
    return places[:, None] - places


def dense_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    table: Table,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> dict[str, Tensor]:
    """out, lse and all gradients through autograd in float64; rows that see nothing give 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("blhd,bmhd->bhlm", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(table).to(q.device), -torch.inf)
    wanted = [q, k, v]
    sink = q.new_full((q.shape[2],), -torch.inf)
    if sinks is not None:
        sink = sinks.detach().double().requires_grad_()
        wanted.append(sink)
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bhlm,bmhd->blhd", p[..., :-1], values)
    grads = torch.autograd.grad(out, wanted, dout.double())
    names = ("dq", "dk", "dv", "dsinks")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=False))}
