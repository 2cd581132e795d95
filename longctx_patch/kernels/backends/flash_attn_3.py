"""FlashAttention-3 (package flash_attn_3) for Hopper; it is built from source.

Its Python functions have changed their arguments, its torch ops have not, so those are called.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longctx_patch.kernels.backends.varlen import contiguous_buffers, lengths_of, window_keywords
from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.kernels.installed import Package, lacks_gpu

PACKAGE = Package(
    distribution="flash-attn-3",
    module="flash_attn_3._C",  # registers the ops
    least="3.0.0b1",
    install="build it in the folder hopper of github.com/Dao-AILab/flash-attention "
    "(python setup.py install), or take flash-attn-4, which comes as a wheel",
)


@dataclass(frozen=True)
class FlashAttn3Kernel:
    name = "flash_attn_3"
    traits = Traits(segments=True, windows=True, tiles=False, softcap=True)
    # Builds before September 2025 drop the deterministic flag (flash-attention #1766, #1893), and
    # their version is that of later ones.
    domain = Domain("cuda", (torch.bfloat16, torch.float16), max_head_dim=256, deterministic=False)
    package: Package = PACKAGE

    def refuses(self, request: KernelRequest) -> str | None:
        return (
            unsupported(request, self.traits, self.domain)
            or lacks_gpu((9, 0), below=10)
            or self.package.problem()
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(segments, q_BLHD)
        self.package.load()
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            softmax_scale=score.scale,
            is_causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap or 0.0,
            num_splits=1,
            **window_keywords(segments, absent=-1),
            **lengths.keywords,
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
        # What the op returns has changed; what it writes to has not.
        grads = contiguous_buffers(q_BLHD, k_BMGD, v_BMGD)
        dq, dk, dv = lengths.packed(*grads)
        self.package.load()
        torch.ops.flash_attn_3.bwd(
            *lengths.packed(dout_BLHD.contiguous(), q_BLHD, k_BMGD, v_BMGD, out_BLHD),
            lengths.packed_lse(lse_BHL),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=score.scale,
            is_causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap or 0.0,
            **window_keywords(segments, absent=-1),
            **lengths.keywords,
        )
        return grads
