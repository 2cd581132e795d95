"""The picture of a mask: who sees whom, in the colours of the ranks that have the queries."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.layout import Interval, Layout
from longctx_patch.sequence.masks import Mask

MOST_SAMPLES = 600
"""Tokens that are drawn, evenly spread over the row."""


def owners(mask: Mask, layout: Layout) -> NDArray[np.int64]:
    """`[n, n]` for n sampled tokens: the rank of the query (rows), -1 where it doesn't see the
    key."""
    sampled = Interval(0, mask.num_tokens, -(-mask.num_tokens // MOST_SAMPLES))
    of_tokens = np.empty(mask.num_tokens, dtype=np.int64)
    for rank, intervals in enumerate(layout.intervals):
        for tokens in intervals:
            of_tokens[tokens.start : tokens.stop : tokens.step] = rank
    of_rows = of_tokens[:: sampled.step, None]
    table = np.full((sampled.size, sampled.size), -1)
    for piece in mask.pieces(sampled, sampled):
        q, kv = (slice(side.start, side.stop) for side in (piece.q, piece.kv))
        table[q, kv] = np.where(piece.bits(), of_rows[q], table[q, kv])
    return table


def draw_mask(axes: Any, mask: Mask, layout: Layout) -> None:
    """Draw a mask, with a legend of the ranks."""
    from matplotlib import colormaps

    num, ranks = mask.num_tokens, layout.num_ranks
    image = axes.imshow(
        np.ma.masked_less(owners(mask, layout), 0),
        cmap=colormaps["viridis"].resampled(ranks),
        vmin=-0.5,
        vmax=ranks - 0.5,
        extent=(0, num, num, 0),
        interpolation="nearest",
    )
    axes.set(xlabel="keys (tokens of the row)", ylabel="queries")
    axes.figure.colorbar(image, ax=axes, label="rank of the query", shrink=0.8)
