"""Matrix products of 16-bit factors whose results are float32."""

import torch
from torch import Tensor


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider."""
    if _has_wide_products(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(torch.promote_types(a.dtype, torch.float32))


def add_wide_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` is float32 or wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _has_wide_products(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _has_wide_products(factor: Tensor) -> bool:
    """Says whether this dtype's products can be returned, and added, in float32.

    torch.mm takes `out_dtype` since torch 2.8, and torch.addmm takes it with a float32 summand
    since 2.10 (pytorch/pytorch#167931); both on CUDA alone.
    """
    return factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16)
