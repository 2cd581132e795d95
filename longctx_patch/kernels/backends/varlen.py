"""Hands segments to FlashAttention's kernels, in a form that all of them take.

A single segment is given by the tensors' shapes, with the batch as a dimension. Several segments
go to the functions for variable lengths, where each row of the batch adds its own segments.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.base import Segments
from longctx_patch.sequence.regions import Tile


class Lengths(NamedTuple):
    """The sizes of the segments as kernels take them; a single segment has no cumulative ones."""

    cumulative_q: Tensor | None
    cumulative_kv: Tensor | None
    max_q: int
    max_kv: int

    @property
    def keywords(self) -> dict[str, Any]:
        """The lengths as the packages' functions name them; empty for one segment."""
        if self.cumulative_q is None:
            return {}
        return {
            "cu_seqlens_q": self.cumulative_q,
            "cu_seqlens_k": self.cumulative_kv,
            "max_seqlen_q": self.max_q,
            "max_seqlen_k": self.max_kv,
        }

    def packed(self, *tensors_BLHD: Tensor) -> tuple[Tensor, ...]:
        """The tensors as they are for one segment, and as `[B * tokens, heads, D]` for several."""
        if self.cumulative_q is None:
            return tensors_BLHD
        return tuple(x.flatten(0, 1) for x in tensors_BLHD)

    def packed_lse(self, lse_BHL: Tensor) -> Tensor:
        """The lse as kernels read it: `[B, H, L]`, and for several segments `[H, B * L]`."""
        if self.cumulative_q is None:
            return lse_BHL.contiguous()
        return lse_BHL.transpose(0, 1).flatten(1).contiguous()

    def lse_by_batch(self, lse: Tensor, batch: int) -> Tensor:
        """A kernel's lse as `[B, H, L]`."""
        if self.cumulative_q is None:
            return lse
        return lse.unflatten(1, (batch, -1)).transpose(0, 1)


def lengths_of(segments: Segments, q_BLHD: Tensor) -> Lengths:
    q, kv, rule = segments
    assert not isinstance(rule, Tile)
    if len(q) == 1:
        return Lengths(None, None, q[0], kv[0])
    batch, device = q_BLHD.shape[0], q_BLHD.device
    return Lengths(_cumulative(q, batch, device), _cumulative(kv, batch, device), max(q), max(kv))


def window_keywords(segments: Segments, absent: int | None) -> dict[str, int | None]:
    """The window's bounds, `absent` where it has none; causal is a bound of 0 on the right."""
    assert not isinstance(segments.rule, Tile)
    left, right = (absent if bound is None else bound for bound in segments.rule)
    return {"window_size_left": left, "window_size_right": right}


@lru_cache(maxsize=256)
def _cumulative(lengths: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """The starts of all segments of all rows of the batch, and the last end: int32.

    Every layer has the same lengths, and making them waits for a copy to the device.
    """
    return torch.tensor([0, *accumulate(lengths * batch)], dtype=torch.int32, device=device)
