"""torch's flash attention on the CPU. It takes GQA as it is, and a merged out and lse."""

import torch
from torch import Tensor

from longctx_patch.kernels.base import KernelRequest, unsupported

_aten = torch.ops.aten


class TorchCpuKernel:
    name = "torch_cpu"

    def refuses(self, request: KernelRequest) -> str | None:
        return unsupported(
            request,
            device_type="cpu",
            dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
            max_head_dim=1024,
            head_dim_multiple=1,
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BLHD.transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            0.0,
            causal,
            scale=scale,
        )
        return out_BHLD.transpose(1, 2), lse_BHL.contiguous()

    def backward(
        self,
        dout_BLHD: Tensor,
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        out_BLHD: Tensor,
        lse_BHL: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads_BHLD = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout_BLHD.transpose(1, 2),
            q_BLHD.transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            out_BLHD.transpose(1, 2),
            lse_BHL,
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads_BHLD)
        return dq, dk, dv
