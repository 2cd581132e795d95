import pytest
import torch

from longctx_patch.kernels import Kernel, KernelRequest, available, choose_kernel
from tests.reference import dense_attention, relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def inputs(
    length: int, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, dout = torch.randn(2, 2, length, heads[0], 8, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 2, length, heads[1], 8, generator=generator, dtype=dtype)
    return q, k, v, dout


@pytest.mark.parametrize("name", ["reference", "torch_cpu"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_dense(name: str, heads: tuple[int, int], length: int, dtype: torch.dtype) -> None:
    kernel = available()[name]
    q, k, v, dout = inputs(length, heads, dtype)
    out, lse = kernel.forward(q, k, v, causal=True, scale=8**-0.5)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=True, scale=8**-0.5)
    assert lse.shape == (2, heads[0], length)
    for found, wanted in zip((out, lse, *grads), dense_attention(q, k, v, dout), strict=True):
        assert found.dtype == dtype
        assert relative_error(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["reference", "torch_cpu"])
def test_backward_takes_the_global_lse(name: str) -> None:
    """Keys in two blocks: block gradients must use out and lse over both."""
    kernel: Kernel = available()[name]
    q, k, v, dout = inputs(16, (4, 2), torch.float64)
    out, lse = kernel.forward(q, k, v, causal=False, scale=1.0)
    whole = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=1.0)
    parts = [
        kernel.backward(dout, q, k[:, cut], v[:, cut], out, lse, causal=False, scale=1.0)
        for cut in (slice(0, 5), slice(5, 16))
    ]
    assert relative_error(parts[0][0] + parts[1][0], whole[0]) < 1e-10
    for i in (1, 2):
        assert relative_error(torch.cat([parts[0][i], parts[1][i]], 1), whole[i]) < 1e-10


def test_the_choice_gives_reasons() -> None:
    request = KernelRequest("cpu", torch.float32, 8)
    assert choose_kernel("auto", request).name == "torch_cpu"
    assert choose_kernel("reference", request).name == "reference"
    with pytest.raises(ValueError, match="cudnn: needs device cuda, tensors are on cpu"):
        choose_kernel("cudnn", request)
    with pytest.raises(ValueError, match="kernel='magic': choose auto or one of"):
        choose_kernel("magic", request)
    with pytest.raises(ValueError, match="takes bfloat16, float16, tensors are float32"):
        choose_kernel("auto", KernelRequest("cuda", torch.float32, 64))
