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
    sums = torch.zeros(len(edges) + 1, dtype=torch.float64)
    counts = torch.zeros(len(edges) + 1, dtype=torch.int64)
    bounds = torch.tensor(edges)
    for batch, logs in zip(batches, log_probs, strict=True):
        labels = batch["labels"][:, 1:]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(labels.shape[1] + 1).expand(len(labels), -1)
        is_label = labels != IGNORE_INDEX
        places = torch.bucketize(positions[:, 1:][is_label], bounds, right=True)
        sums.index_add_(0, places, -logs[is_label].double())
        counts += places.bincount(minlength=len(counts))
    buckets = range(1, len(edges))
    return PositionLosses(
        edges=tuple(edges),
        loss=tuple(float(sums[n] / counts[n]) if counts[n] else None for n in buckets),
        tokens=tuple(int(counts[n]) for n in buckets),
    )


def edge_problem(edges: Sequence[int]) -> str | None:
    """Says why these can't be edges of buckets, in words."""
    if len(edges) >= 2 and edges[0] >= 0 and all(a < b for a, b in pairwise(edges)):
        return None
    return f"edges={tuple(edges)}: give two or more positions that rise, such as (0, 1024, 4096)."
