"""What a kernel does and what is asked of it.

Shapes: B batch, L query tokens, M key tokens, H query heads, G key-value heads (G divides H),
D head dim. A causal block is square and row `i` sees the columns `0..i`.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class KernelRequest(NamedTuple):
    """What a kernel must be able to compute."""

    device_type: str
    dtype: torch.dtype
    head_dim: int


class Kernel(Protocol):
    """One backend. `out` and `lse` given to `backward` are the global ones, over all keys."""

    name: str

    def refuses(self, request: KernelRequest) -> str | None:
        """Why this kernel can't do it, or None if it can."""
        ...

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL in float32 or, for float64 inputs, float64)."""
        ...

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
        """This block's share of (dq_BLHD, dk_BMGD, dv_BMGD)."""
        ...


def unsupported(
    request: KernelRequest,
    *,
    device_type: str,
    dtypes: tuple[torch.dtype, ...],
    max_head_dim: int,
    head_dim_multiple: int = 8,
) -> str | None:
    """The first thing a request asks that a kernel lacks, in words."""
    if request.device_type != device_type:
        return f"needs device {device_type}, tensors are on {request.device_type}"
    if request.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"takes {names}, tensors are {str(request.dtype).removeprefix('torch.')}"
    if request.head_dim > max_head_dim or request.head_dim % head_dim_multiple:
        return (
            f"takes head dims up to {max_head_dim} that are a multiple of {head_dim_multiple}, "
            f"this one is {request.head_dim}"
        )
    return None
