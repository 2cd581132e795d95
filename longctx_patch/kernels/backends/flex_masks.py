"""Segments as FlexAttention's block masks, in closed form.

Every row of a window sees one run of columns, so two numbers per row describe any lengths and
bounds. One compiled kernel reads them from tensors.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longctx_patch.kernels.base import Segments, Window
from longctx_patch.sequence.regions import Tile

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padded_size(size: int) -> int:
    """`size` rounded up to whole blocks, at least two: one block would be compiled separately."""
    return max(2, -(-size // _BLOCK)) * _BLOCK


@lru_cache(maxsize=64)
def block_mask(segments: Segments, device: torch.device) -> "BlockMask":
    """The mask of the padded rows and columns; every layer asks for the same ones."""
    rows, columns = padded_size(sum(segments.q)), padded_size(sum(segments.kv))
    if isinstance(segments.rule, Tile):
        bits = np.zeros((rows, columns), dtype=np.bool_)
        bits[: segments.q[0], : segments.kv[0]] = segments.rule.bits
        blocks = bits.reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
        some, whole = np.any(blocks, axis=(1, 3)), np.all(blocks, axis=(1, 3))
        mask_mod = _table(torch.from_numpy(bits).to(device))
        return _block_mask(np.asarray(some), np.asarray(whole), mask_mod, device)
    first, last = _runs(segments, segments.rule, rows, columns)
    some, whole = _blocks_of_runs(first, last, columns)
    mask_mod = _run(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in (first, last)))
    return _block_mask(some, whole, mask_mod, device)


def _table(bits_LM: Tensor) -> MaskMod:
    def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return bits_LM[row, column]

    return seen


def _run(first_L: Tensor, last_L: Tensor) -> MaskMod:
    def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column >= first_L[row]) & (column <= last_L[row])

    return seen


def _runs(
    segments: Segments, window: Window, rows: int, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last column of each row; rows of padding have their last before the first."""
    q, kv = np.array(segments.q), np.array(segments.kv)
    first, last = np.full(rows, columns), np.full(rows, -1)
    used = slice(0, int(q.sum()))
    left_edge = np.repeat(np.cumsum(kv) - kv, q)
    right_edge = np.repeat(np.cumsum(kv) - 1, q)
    # Where the diagonal that ends in the last row and column of the segment meets each row.
    diagonal = np.arange(q.sum()) + np.repeat(np.cumsum(kv) - np.cumsum(q), q)
    left, right = window
    first[used] = left_edge if left is None else np.maximum(left_edge, diagonal - left)
    last[used] = right_edge if right is None else np.minimum(right_edge, diagonal + right)
    return first, last


def _blocks_of_runs(
    first: NDArray[np.int64], last: NDArray[np.int64], columns: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Blocks `[row, column]` that may have an allowed pair, and those with no hidden pair."""
    start = np.arange(0, columns, _BLOCK)
    stop = start + _BLOCK - 1
    by_block = first.reshape(-1, _BLOCK), last.reshape(-1, _BLOCK)
    some = (stop >= by_block[0].min(1)[:, None]) & (start <= by_block[1].max(1)[:, None])
    whole = (start >= by_block[0].max(1)[:, None]) & (stop <= by_block[1].min(1)[:, None])
    return some, whole


def _block_mask(
    some: NDArray[np.bool_], whole: NDArray[np.bool_], mask_mod: MaskMod, device: torch.device
) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask

    sizes = some.shape[0] * _BLOCK, some.shape[1] * _BLOCK
    partial, full = _ordered(some & ~whole, device), _ordered(whole, device)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=sizes
    )


def _ordered(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of set blocks in each row, and all blocks' numbers with the set ones first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    count = blocks.sum(axis=1).astype(np.int32)
    return (
        torch.from_numpy(count)[None, None].to(device),
        torch.from_numpy(order)[None, None].to(device),
    )
