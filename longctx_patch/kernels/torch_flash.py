"""torch's own flash attention on CUDA (FlashAttention-2, or 3 and 4 where torch was told to).

Several segments go to its variable-length form, where the rows of the batch are segments too.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.regions import Tile

_aten = torch.ops.aten


class TorchFlashKernel:
    name = "torch_flash"
    traits = Traits(segments=True, windows=True, tiles=False, softcap=False)

    def refuses(self, request: KernelRequest) -> str | None:
        return unsupported(
            request,
            self.traits,
            device_type="cuda",
            dtypes=(torch.bfloat16, torch.float16),
            max_head_dim=256,
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = _lengths(segments, q_BLHD)
        out, lse, *_ = _aten._flash_attention_forward(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            *lengths.arguments,
            0.0,
            segments.rule == CAUSAL_WINDOW,
            False,
            scale=score.scale,
            **_window(segments),
        )
        return out.view(q_BLHD.shape), lengths.lse_by_batch(lse, q_BLHD.shape[0])

    def backward(
        self,
        dout_BLHD: Tensor,
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        out_BLHD: Tensor,
        lse_BHL: Tensor,
        segments: Segments,
        score: Score,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = _lengths(segments, q_BLHD)
        grads = _aten._flash_attention_backward(
            *lengths.packed(dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD),
            lengths.packed_lse(lse_BHL),
            *lengths.arguments,
            0.0,
            segments.rule == CAUSAL_WINDOW,
            # Without dropout the random state is not read, but the op wants tensors of this type.
            torch.empty(2, dtype=torch.uint64, device=q_BLHD.device),
            torch.empty(0, dtype=torch.uint64, device=q_BLHD.device),
            scale=score.scale,
            **_window(segments),
        )
        dq, dk, dv = (x.view_as(y) for x, y in zip(grads, (q_BLHD, k_BMGD, v_BMGD), strict=True))
        return dq, dk, dv


class _Lengths(NamedTuple):
    """What the ops are told of the segments. Of one segment: nothing but its size."""

    cumulative_q: Tensor | None
    cumulative_kv: Tensor | None
    max_q: int
    max_kv: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self)

    def packed(self, *tensors_BLHD: Tensor) -> tuple[Tensor, ...]:
        """`[B * tokens, heads, D]` of several segments."""
        if self.cumulative_q is None:
            return tensors_BLHD
        return tuple(x.flatten(0, 1) for x in tensors_BLHD)

    def packed_lse(self, lse_BHL: Tensor) -> Tensor:
        """The op wants `[B, H, L]`, of several segments `[H, B * L]`."""
        if self.cumulative_q is None:
            return lse_BHL.contiguous()
        return lse_BHL.transpose(0, 1).flatten(1).contiguous()

    def lse_by_batch(self, lse: Tensor, batch: int) -> Tensor:
        """`[B, H, L]`."""
        if self.cumulative_q is None:
            return lse
        return lse.unflatten(1, (batch, -1)).transpose(0, 1)


def _lengths(segments: Segments, q_BLHD: Tensor) -> _Lengths:
    q, kv, rule = segments
    assert not isinstance(rule, Tile)
    if len(q) == 1:
        return _Lengths(None, None, q[0], kv[0])
    batch, device = q_BLHD.shape[0], q_BLHD.device
    return _Lengths(_cumulative(q, batch, device), _cumulative(kv, batch, device), max(q), max(kv))


@lru_cache(maxsize=256)
def _cumulative(lengths: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Where each segment of each row of the batch begins and the last one ends: int32.

    Every layer has the same lengths, and making them waits for a copy to the device.
    """
    return torch.tensor([0, *accumulate(lengths * batch)], dtype=torch.int32, device=device)


def _window(segments: Segments) -> Mapping[str, int | None]:
    """The op's bounds: absent ones are None; causal is a bound of 0 on the right."""
    assert not isinstance(segments.rule, Tile)
    left, right = segments.rule
    return {"window_size_left": left, "window_size_right": right}
