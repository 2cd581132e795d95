"""torch's own flash attention on CUDA (FlashAttention-2, or 3 and 4 where torch was told to)."""

import torch
from torch import Tensor

from longctx_patch.kernels.base import KernelRequest, unsupported

_aten = torch.ops.aten


class TorchFlashKernel:
    name = "torch_flash"

    def refuses(self, request: KernelRequest) -> str | None:
        return unsupported(
            request,
            device_type="cuda",
            dtypes=(torch.bfloat16, torch.float16),
            max_head_dim=256,
        )

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out_BLHD, lse_BHL, *_ = _aten._flash_attention_forward(
            q_BLHD,
            k_BMGD,
            v_BMGD,
            None,
            None,
            q_BLHD.shape[1],
            k_BMGD.shape[1],
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out_BLHD, lse_BHL

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
        # Without dropout the random state is not read, but the op wants tensors of this type.
        unused = torch.empty(0, dtype=torch.uint64, device=q_BLHD.device)
        dq, dk, dv = _aten._flash_attention_backward(
            dout_BLHD,
            q_BLHD,
            k_BMGD,
            v_BMGD,
            out_BLHD,
            lse_BHL.contiguous(),
            None,
            None,
            q_BLHD.shape[1],
            k_BMGD.shape[1],
            0.0,
            causal,
            torch.empty(2, dtype=torch.uint64, device=q_BLHD.device),
            unused,
            scale=scale,
        )
        return dq, dk, dv
