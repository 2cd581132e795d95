"""Plain attention in float64, for tests and for judging the other kernels. Slow; any device."""

import torch
from torch import Tensor

from longctx_patch.kernels.base import KernelRequest


class ReferenceKernel:
    name = "reference"

    def refuses(self, request: KernelRequest) -> str | None:
        return None if request.dtype.is_floating_point else f"takes floats, not {request.dtype}"

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores_BGRLM = _scores(q_BLHD, k_BMGD, causal, scale)
        lse_BGRL = torch.logsumexp(scores_BGRLM, -1)
        p_BGRLM = torch.exp(scores_BGRLM - lse_BGRL[..., None])
        out_BLHD = torch.einsum("bgrlm,bmgd->blgrd", p_BGRLM, v_BMGD.double()).flatten(2, 3)
        lse_dtype = torch.float64 if q_BLHD.dtype == torch.float64 else torch.float32
        return out_BLHD.to(q_BLHD.dtype), lse_BGRL.flatten(1, 2).to(lse_dtype)

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
        num_kv_heads = k_BMGD.shape[2]
        q, dout = _grouped(q_BLHD, num_kv_heads), _grouped(dout_BLHD, num_kv_heads)
        k, v = k_BMGD.double(), v_BMGD.double()
        delta_BGRL = (dout * _grouped(out_BLHD, num_kv_heads)).sum(-1).permute(0, 2, 3, 1)
        lse_BGRL = lse_BHL.double().unflatten(1, (num_kv_heads, -1))
        p = torch.exp(_scores(q_BLHD, k_BMGD, causal, scale) - lse_BGRL[..., None])
        ds = p * (torch.einsum("blgrd,bmgd->bgrlm", dout, v) - delta_BGRL[..., None]) * scale
        dq = torch.einsum("bgrlm,bmgd->blgrd", ds, k).flatten(2, 3)
        dk = torch.einsum("bgrlm,blgrd->bmgd", ds, q)
        dv = torch.einsum("bgrlm,blgrd->bmgd", p, dout)
        return dq.to(q_BLHD.dtype), dk.to(k_BMGD.dtype), dv.to(v_BMGD.dtype)


def _grouped(x_BLHD: Tensor, num_kv_heads: int) -> Tensor:
    """float64 `[B, L, G, H / G, D]`."""
    return x_BLHD.double().unflatten(2, (num_kv_heads, -1))


def _scores(q_BLHD: Tensor, k_BMGD: Tensor, causal: bool, scale: float) -> Tensor:
    q = _grouped(q_BLHD, k_BMGD.shape[2])
    scores_BGRLM = torch.einsum("blgrd,bmgd->bgrlm", q, k_BMGD.double()) * scale
    if causal:
        ones_LM = torch.ones(scores_BGRLM.shape[-2:], dtype=torch.bool, device=q.device)
        scores_BGRLM = scores_BGRLM.masked_fill(~ones_LM.tril(), -torch.inf)
    return scores_BGRLM
