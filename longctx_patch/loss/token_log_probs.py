"""Log-probabilities of tokens, a tile at a time, so that full logits never exist.

The logits of one tile are made, used and dropped, and made again in backward: that is
`torch.utils.checkpoint` over a tile (Chen et al., arXiv 1604.06174). Any module can be the head,
adapters and quantised weights included. `linear_scores` takes a quarter less work, but gradients of
a head that learns are then those of sums over tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longctx_patch.loss.law import IGNORE_INDEX

TILE_BYTES = 2**29
"""Bytes of a tile's float32 logits: at 128,256 words those of 1,046 tokens. Forward and backward
hold about four times as much, the logits in 16 bits and their gradients included."""


def label_scores(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    num_words: int,
    softcap: float | None = None,
    scale: float = 1.0,
    tile_bytes: int | None = None,
    with_top1: bool = False,
) -> tuple[Tensor, Tensor]:
    """`log_softmax(softcap(scale * head(hidden)))` of each token's label, 0 for `IGNORE_INDEX`, and
    whether this label is the word that greedy decoding takes.

    Args:
        head: `[1, tokens, D]` to logits `[1, tokens, V]`; it is called once for each tile, and
            again in backward.
        hidden: `[N, D]`, any float dtype.
        labels: `[N]` int64. Tokens of `IGNORE_INDEX` cost as much as others.
        num_words: V.
        softcap: c of c * tanh(logits / c), after the scale.
        scale: factor of the logits.
        tile_bytes: most bytes of a tile's float32 logits (default: `TILE_BYTES`); a tile has one
            token at least.
        with_top1: whether top-1 hits are wanted, which cost a pass over the logits.

    Returns:
        `[N]` float32 (float64 for float64 logits). Without tokens it is empty, but still part of
        the graph, since backward of other ranks may wait for this one's. Beside it `[N]` bool, or
        `[0]` where top-1 hits are not wanted: no word has a larger logit, nor as large a one with a
        lower number.
    """
    largest = max(1, (tile_bytes or TILE_BYTES) // (4 * num_words))
    num_tiles = max(1, -(-len(hidden) // largest))

    def of_tile(hidden_TD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = head(hidden_TD[None])[0]
        is_top1_T = logits_TV.argmax(-1) == labels_T if with_top1 else labels_T[:0].bool()
        return _label_log_probs(logits_TV, labels_T, softcap, scale), is_top1_T

    tiles = zip(hidden.tensor_split(num_tiles), labels.tensor_split(num_tiles), strict=True)
    if torch.is_grad_enabled():
        found = [checkpoint(of_tile, *tile, use_reentrant=False) for tile in tiles]
    else:  # a checkpoint would read the state of random numbers for each tile: the host would wait
        found = [of_tile(*tile) for tile in tiles]
    log_probs, is_top1 = zip(*found, strict=True)
    return torch.cat(log_probs), torch.cat(is_top1)


def _label_log_probs(
    logits_TV: Tensor, labels_T: Tensor, softcap: float | None, scale: float
) -> Tensor:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if scale != 1:
        logits_TV = logits_TV * scale
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    return -F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
