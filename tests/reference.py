"""Dense attention in one process, written independently of the package."""

import torch
from torch import Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, dq, dk, dv) of causal attention over BLHD tensors, through autograd in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("blhd,bmhd->bhlm", q, keys) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), lse.detach(), dq, dk, dv


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (absolute where that is zero)."""
    difference = (found.double() - wanted.double()).norm().item()
    scale = wanted.double().norm().item()
    return difference / scale if scale > 0 else difference
