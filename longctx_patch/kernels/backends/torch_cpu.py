"""torch's flash attention on the CPU. It takes GQA without repeated heads, tables, and a merged
out and lse."""

import torch
from torch import Tensor

from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    BackwardInputs,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.sequence.regions import Tile

_aten = torch.ops.aten


class TorchCpuKernel:
    name = "torch_cpu"
    traits = Traits(segments=False, windows=False, tiles=True, softcap=False)
    domain = Domain(
        "cpu",
        (torch.float32, torch.float64, torch.bfloat16, torch.float16),
        max_head_dim=1024,
        head_dim_multiple=1,
    )

    def refuses(self, request: KernelRequest) -> str | None:
        return unsupported(request, self.traits, self.domain)

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BLHD.transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            0.0,
            segments.rule == CAUSAL_WINDOW,
            attn_mask=_added(segments, q_BLHD),
            scale=score.scale,
        )
        return out_BHLD.transpose(1, 2), lse_BHL.contiguous()

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD, lse_BHL = given
        grads_BHLD = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_BLHD.transpose(1, 2),
            q_BLHD.transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            out_BLHD.transpose(1, 2),
            lse_BHL,
            0.0,
            segments.rule == CAUSAL_WINDOW,
            attn_mask=_added(segments, q_BLHD),
            scale=score.scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads_BHLD)
        return dq, dk, dv


def _added(segments: Segments, q_BLHD: Tensor) -> Tensor | None:
    """A table as a bias added to the scores: 0, or minus infinity where a pair is hidden."""
    if not isinstance(segments.rule, Tile):
        return None
    hidden_LM = torch.from_numpy(~segments.rule.bits)
    return q_BLHD.new_zeros(hidden_LM.shape).masked_fill_(hidden_LM, -torch.inf)
