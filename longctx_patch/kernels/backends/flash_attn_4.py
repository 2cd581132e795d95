"""FlashAttention-4 (package flash-attn-4, CuTe): the fastest on Hopper and Blackwell.

It comes as a wheel and compiles itself at first use: a second or two for each combination of dtype,
head dim, group of heads, kind of mask, segments or none, and softcap; and once more for blocks of a
single tile, but not for any other length.
"""

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
from longctx_patch.kernels.installed import Package, lacks_gpu

PACKAGE = Package(
    distribution="flash-attn-4",
    module="flash_attn.cute.interface",
    least="4.0.0b36",
    install='pip install "flash-attn-4[cu13]==4.0.0b36" (for torch with CUDA 12 without [cu13])',
)


@dataclass(frozen=True)
class FlashAttn4Kernel:
    deterministic: bool = False
    name = "flash_attn_4"
    traits = Traits(segments=True, windows=True, tiles=False, softcap=True)
    domain = Domain("cuda", (torch.bfloat16, torch.float16), max_head_dim=256)
    package: Package = PACKAGE

    def refuses(self, request: KernelRequest) -> str | None:
        return (
            unsupported(request, self.traits, self.domain)
            or lacks_gpu((9, 0), below=12)  # 8.x has no backward, 12.x neither softcap nor order
            or _wrong_head_dim(request.head_dim)
            or _refused_on_blackwell(request)
            or self.package.problem()
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(segments, q_BLHD)
        out, lse, *_ = self.package.load()._flash_attn_fwd(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            softmax_scale=score.scale,
            causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap,
            return_lse=True,
            **window_keywords(segments, absent=None),
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
        q, k, v, out, dout = lengths.packed(q_BLHD, k_BMGD, v_BMGD, out_BLHD, dout_BLHD)
        dq, dk, dv = self.package.load()._flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lengths.packed_lse(lse_BHL),
            softmax_scale=score.scale,
            causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap or 0.0,
            deterministic=self.deterministic,
            **window_keywords(segments, absent=None),
            **lengths.keywords,
        )
        return dq.view(q_BLHD.shape), dk.view(k_BMGD.shape), dv.view(v_BMGD.shape)


def _wrong_head_dim(head_dim: int) -> str | None:
    """Seen with 4.0.0b36 on H200: dq is off by 0.9 for 8, 16, 40, 48, 72, 80, 104 and 112, and
    right for all other multiples of 8 to 128 and for 160, 192, 224 and 256."""
    padded = -(-head_dim // 16) * 16
    if padded % 32 == 0:
        return None
    return f"has a wrong dq for head dims that round up to {padded}, this one is {head_dim}"


def _refused_on_blackwell(request: KernelRequest) -> str | None:
    """Its kernels for 10.x and 11.x take fewer head dims, and backward has hung with softcap.

    https://github.com/Dao-AILab/flash-attention/issues/2466
    """
    if torch.cuda.get_device_capability() < (10, 0):
        return None
    if request.head_dim > 128 and request.head_dim != 256:
        return f"takes head dims up to 128, and 256, on this GPU; this one is {request.head_dim}"
    if request.softcap:
        return "has hung in backward with a softcap of scores on Blackwell (flash-attention #2466)"
    return None
