"""Losses of long texts by position: whether later tokens are predicted better, as they have more
context, or worse, as they lie beyond what the model was trained for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from longctx_patch.evaluation.row_scorer import Batch
from longctx_patch.loss.law import IGNORE_INDEX

FIRST_EDGES = (0, 1024, 4096)


@dataclass(frozen=True, kw_only=True)
class PositionLosses:
    """The mean loss of tokens with so many tokens before them in their document."""

    edges: tuple[int, ...]
    """Bucket `n` has the tokens with `edges[n]` to `edges[n + 1] - 1` tokens before them."""
    loss: tuple[float | None, ...]
    """The mean that each bucket has over its tokens, in nats; None where it has no tokens."""
    tokens: tuple[int, ...]
    """How many each bucket has."""
    texts: tuple[int, ...] = ()
    """How many texts (rows) have tokens in each bucket; empty in scores of earlier versions."""
    standard_error: tuple[float | None, ...] = ()
    """The standard error of each mean over its texts, since tokens of one text are not independent:
    with the sum `s` of losses and the number `c` of tokens of each of `n` texts,
    `sqrt(n / (n - 1) * sum((s - loss * c)**2)) / sum(c)`. Where texts have as many tokens this is
    the standard deviation of their means, by `sqrt(n)`. None with fewer than two texts."""


def default_edges(length: int) -> tuple[int, ...]:
    """0, 1K, 4K, and from there on powers of two, up to the length; of a row of at most 4K tokens
    its eighth, its quarter and its half.

    Example:
        >>> default_edges(20_000)
        (0, 1024, 4096, 8192, 16384, 20000)
        >>> default_edges(1024)
        (0, 128, 256, 512, 1024)
    """
    if length <= FIRST_EDGES[-1]:
        return tuple(sorted({0, length // 8, length // 4, length // 2, length}))
    edges = [edge for edge in FIRST_EDGES if edge < length]
    while edges[-1] >= FIRST_EDGES[-1] and 2 * edges[-1] < length:
        edges.append(2 * edges[-1])
    return (*edges, length)


def loss_by_position(
    batches: Sequence[Batch], log_probs: Sequence[Tensor], edges: Sequence[int]
) -> PositionLosses:
    """Mean losses by position, each label with the same weight.

    Args:
        batches: whole rows, `[B, L]` each; `position_ids` where documents are packed.
        log_probs: `[B, L - 1]` of each batch, on the CPU.
        edges: rising; labels beyond the last are left out.
    """
    sums, counts = list[Tensor](), list[Tensor]()  # [texts, buckets] of each batch
    bounds, width = torch.tensor(edges), len(edges) + 1
    for batch, logs in zip(batches, log_probs, strict=True):
        labels = batch["labels"][:, 1:]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(labels.shape[1] + 1).expand(len(labels), -1)
        is_label = labels != IGNORE_INDEX
        places = torch.bucketize(positions[:, 1:][is_label], bounds, right=True)
        places += width * is_label.nonzero()[:, 0]
        size, losses = len(labels) * width, -logs[is_label].double()
        sums.append(torch.bincount(places, losses, size).view(-1, width))
        counts.append(torch.bincount(places, minlength=size).view(-1, width))
    buckets = [*zip(torch.cat(sums).T[1:-1], torch.cat(counts).T[1:-1], strict=True)]
    return PositionLosses(
        edges=tuple(edges),
        loss=tuple(float(s.sum() / c.sum()) if c.any() else None for s, c in buckets),
        tokens=tuple(int(c.sum()) for _, c in buckets),
        texts=tuple(int(c.count_nonzero()) for _, c in buckets),
        standard_error=tuple(_standard_error(s, c) for s, c in buckets),
    )


def _standard_error(sums: Tensor, counts: Tensor) -> float | None:
    """See `PositionLosses`; `sums` and `counts` are of a bucket, one of each text."""
    number, total = int(counts.count_nonzero()), counts.sum()
    if number < 2:
        return None
    off = sums - sums.sum() / total * counts
    return float((number / (number - 1) * off.square().sum()).sqrt() / total)


def edge_problem(edges: Sequence[int]) -> str | None:
    """Says why these can't be edges of buckets, in words."""
    if len(edges) >= 2 and edges[0] >= 0 and all(a < b for a, b in pairwise(edges)):
        return None
    return f"edges={tuple(edges)}: give two or more positions that rise, such as (0, 1024, 4096)."
