"""How cuDNN's backward is called: its graphs depend on layouts that torch's key leaves out."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.kernels import BackwardInputs, Score, Segments
from longctx_patch.kernels.backends import cudnn
from longctx_patch.kernels.base import CAUSAL_WINDOW
from tests.kernels.dense import problem


def laid_out(tensor: Tensor) -> list[Tensor]:
    """The same numbers in several layouts."""
    wide = torch.cat([tensor, tensor], dim=1)
    by_head = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return [tensor, by_head, wide[:, : tensor.shape[1]]]


@pytest.mark.parametrize("rows", [1, 2])
def test_all_calls_have_one_layout_that_no_other_has(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def backward(*given: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(given)
        return given[1], given[2], given[3]

    fake = SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward)
    monkeypatch.setattr(cudnn, "_aten", fake)
    q, k, v, dout = (x[:rows] for x in problem(16, 16, (4, 2), torch.bfloat16)[:4])
    lse = torch.randn(rows, 4, 16)
    segments = Segments((16,), (16,), CAUSAL_WINDOW)
    ways = [*product(laid_out(q), laid_out(dout), laid_out(dout))]
    for own_q, own_dout, out in ways:
        given = BackwardInputs(own_dout, own_q, k, v, out, lse)
        dq, _, _ = cudnn.CudnnKernel().backward(given, segments, Score(1.0))
        assert torch.equal(dq, q)
        found_dout, found_q, _, _, found_out, found_lse = calls[-1][:6]
        assert torch.equal(found_dout, dout.transpose(1, 2))
        assert torch.equal(found_out, dout.transpose(1, 2))
        assert torch.equal(found_lse, lse[..., None])
        assert found_q.stride(3) == 1
    assert len({tuple(x.stride() for x in call[:2] + call[4:6]) for call in calls}) == 1
    strides_of_others = {x.transpose(1, 2).stride() for x in laid_out(q)}
    assert calls[0][1].stride() not in strides_of_others


@pytest.mark.parametrize(
    ("shape", "kv_heads", "numbers"),
    [
        ((2**19, 65, 1, 63), 1, "65 queries of 1 heads take 2,180,513,728 numbers"),  # with gaps
        ((1, 2**21, 8, 128), 1, "2,147,483,648 numbers"),  # a single head of keys can't be cut
    ],
)
def test_queries_that_reach_beyond_32_bits_are_refused(
    shape: tuple[int, int, int, int], kv_heads: int, numbers: str
) -> None:
    """cuDNN gets their gradients wrong. The meta device needs no memory."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    given = BackwardInputs(q, q, q[:, :, :kv_heads], q[:, :, :kv_heads], q, q[..., 0].mT)
    segments = Segments(shape[1:2], shape[1:2], CAUSAL_WINDOW)
    with pytest.raises(ValueError, match=rf"{numbers}.*'flash_attn_4'"):
        cudnn.CudnnKernel().backward(given, segments, Score(1.0))
