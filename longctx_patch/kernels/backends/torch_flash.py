"""torch's own flash attention on CUDA (FlashAttention-2, or 3 and 4 where torch was told to)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx_patch.kernels.backends.varlen import lengths_of, window_keywords
from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.kernels.installed import lacks_gpu

_aten = torch.ops.aten


@dataclass(frozen=True)
class TorchFlashKernel:
    deterministic: bool = False
    name = "torch_flash"
    traits = Traits(segments=True, windows=True, tiles=False, softcap=False)
    domain = Domain("cuda", (torch.bfloat16, torch.float16), max_head_dim=256)

    def refuses(self, request: KernelRequest) -> str | None:
        return unsupported(request, self.traits, self.domain) or lacks_gpu((8, 0))

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(segments, q_BLHD)
        out, lse, *_ = _aten._flash_attention_forward(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            *lengths,
            0.0,
            segments.rule == CAUSAL_WINDOW,
            False,
            scale=score.scale,
            **window_keywords(segments, absent=None),
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
        lengths = lengths_of(segments, q_BLHD)
        with _deterministic_algorithms(self.deterministic):
            grads = _aten._flash_attention_backward(
                *lengths.packed(dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD),
                lengths.packed_lse(lse_BHL),
                *lengths,
                0.0,
                segments.rule == CAUSAL_WINDOW,
                # Without dropout the random state is not read, but the op wants tensors of this
                # type.
                torch.empty(2, dtype=torch.uint64, device=q_BLHD.device),
                torch.empty(0, dtype=torch.uint64, device=q_BLHD.device),
                scale=score.scale,
                **window_keywords(segments, absent=None),
            )
        dq, dk, dv = (x.view_as(y) for x, y in zip(grads, (q_BLHD, k_BMGD, v_BMGD), strict=True))
        return dq, dk, dv


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """The op has no argument for it: it asks torch for the whole process, and warn-only is no."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
