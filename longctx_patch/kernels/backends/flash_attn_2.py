"""FlashAttention-2 (package flash-attn), which torch's own flash op is too, without a softcap.

Most platforms have to compile it from source.
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
    distribution="flash-attn",
    module="flash_attn.flash_attn_interface",
    least="2.8.0",
    install='pip install --no-build-isolation "flash-attn>=2.8,<3"',
)


@dataclass(frozen=True)
class FlashAttn2Kernel:
    deterministic: bool = False
    name = "flash_attn_2"
    traits = Traits(segments=True, windows=True, tiles=False, softcap=True)
    domain = Domain("cuda", (torch.bfloat16, torch.float16), max_head_dim=256)
    package: Package = PACKAGE

    def refuses(self, request: KernelRequest) -> str | None:
        return (
            unsupported(request, self.traits, self.domain)
            or lacks_gpu((8, 0))
            or self.package.problem()
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(segments, q_BLHD)
        module = self.package.load()
        run = module._flash_attn_varlen_forward if lengths.keywords else module._flash_attn_forward
        out, lse, *_ = run(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            dropout_p=0.0,
            softmax_scale=score.scale,
            causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap or 0.0,
            alibi_slopes=None,
            return_softmax=False,
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
        module = self.package.load()
        run = (
            module._flash_attn_varlen_backward if lengths.keywords else module._flash_attn_backward
        )
        grads = contiguous_buffers(q_BLHD, k_BMGD, v_BMGD)
        dq, dk, dv = lengths.packed(*grads)
        run(
            *lengths.packed(dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD),
            lengths.packed_lse(lse_BHL),
            dq=dq,
            dk=dk,
            dv=dv,
            dropout_p=0.0,
            softmax_scale=score.scale,
            causal=segments.rule == CAUSAL_WINDOW,
            softcap=score.softcap or 0.0,
            alibi_slopes=None,
            deterministic=self.deterministic,
            **window_keywords(segments, absent=-1),
            **lengths.keywords,
        )
        return grads
