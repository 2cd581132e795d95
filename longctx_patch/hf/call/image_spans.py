"""Images whose tokens see each other in both directions (Gemma 3 and 4), as a mask of the row."""

from itertools import pairwise

import torch
from torch import Tensor

from longctx_patch.data.whole_rows import RowsPass
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import Mask, mask_of
from longctx_patch.sequence.regions import CAUSAL, FULL, Piece

Spans = tuple[tuple[int, int], ...]
"""(first, one past the last) token of each image in a row."""


def spans_of(kinds: Tensor, rows: RowsPass) -> Spans:
    """Where the images of rows are, neighbours as one; `kinds` `[B, L]` is 1 on their tokens, and 2
    on those of videos.

    Raises ValueError for rows that have them in different places: a batch has one mask.
    """
    is_image = ((kinds == 1) | (kinds == 2)).cpu()
    by_row = {
        _runs(row[start:stop]) for row, (start, stop) in zip(is_image, rows.spans, strict=True)
    }
    if len(by_row) > 1:
        raise ValueError(
            f"{len(rows.spans)} rows with images in different places: tokens of an image see each "
            "other in both directions, so that each row has a mask of its own. Give one row a "
            "batch, and accumulate gradients."
        )
    return by_row.pop()


def _runs(row: Tensor) -> Spans:
    edges = torch.diff(row.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    found: list[int] = edges[:, 0].tolist()
    return tuple(zip(found[::2], found[1::2], strict=True))


def spans_mask(num_tokens: int, spans: Spans) -> Mask:
    """Causal, and within each span in both directions."""
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    regions = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        here = Interval(start, stop)
        is_image = bool(number % 2)
        regions.append(Piece(here, Interval(0, start), FULL))
        regions.append(Piece(here, here, FULL if is_image else CAUSAL))
    name = f"causal, {len(spans)} images in both directions"
    return mask_of(num_tokens, [piece for piece in regions if piece.area], name)
