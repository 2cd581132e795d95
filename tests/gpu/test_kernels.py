"""CUDA kernels against float64, and what a distributed plan asks of them."""

import pytest
import torch
from torch import Tensor

from longctx_patch.kernels import KernelRequest, available, choose_kernel
from tests.reference import dense_attention, relative_error

pytestmark = pytest.mark.gpu

KERNELS = ["torch_flash", "cudnn"]
# bfloat16 has 8 bits: rounding inputs of softmax, out and gradients gives a few of its 2^-9.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def inputs(length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(length)
    shapes = [(2, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (7, 1)])
@pytest.mark.parametrize("length", [64, 257])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_float64(
    name: str, heads: tuple[int, int], length: int, dim: int, dtype: torch.dtype
) -> None:
    kernel = available()[name]
    q, k, v, dout = inputs(length, *heads, dim, dtype)
    out, lse = kernel.forward(q, k, v, causal=True, scale=dim**-0.5)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=True, scale=dim**-0.5)
    assert lse.shape == (2, heads[0], length)
    assert lse.dtype == torch.float32
    for found, wanted in zip((out, lse, *grads), dense_attention(q, k, v, dout), strict=True):
        assert relative_error(found, wanted) < BOUND[dtype]


@pytest.mark.parametrize("name", KERNELS)
def test_row_slices_and_a_global_lse(name: str) -> None:
    """Slices of rows are not contiguous with a batch of two; block gradients add up."""
    kernel = available()[name]
    q, k, v, dout = inputs(256, 8, 2, 64, torch.bfloat16)
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.125)
    whole = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=0.125)
    halves = (slice(0, 128), slice(128, 256))
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for rows in halves:
        for columns in halves:
            part = kernel.backward(
                dout[:, rows],
                q[:, rows],
                k[:, columns],
                v[:, columns],
                out[:, rows],
                lse[:, :, rows],
                causal=False,
                scale=0.125,
            )
            dq[:, rows] += part[0]
            dk[:, columns] += part[1]
            dv[:, columns] += part[2]
    for found, wanted in zip((dq, dk, dv), whole, strict=True):
        assert relative_error(found, wanted) < 1e-2


def test_auto_prefers_cudnn() -> None:
    assert choose_kernel("auto", KernelRequest("cuda", torch.bfloat16, 128)).name == "cudnn"
    assert choose_kernel("auto", KernelRequest("cuda", torch.bfloat16, 256)).name == "torch_flash"
