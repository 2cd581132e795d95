"""Rows so long that a tensor has more numbers than 32 bits count, checked at their end."""

import pytest
import torch
from torch import Tensor

from longctx_patch.kernels import BackwardInputs, KernelRequest, Score, Segments, run
from longctx_patch.kernels.base import FULL_WINDOW
from longctx_patch.kernels.calls import Call
from longctx_patch.kernels.select.registry import available
from longctx_patch.sequence.layout import Interval
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

LONG, SHORT, HEADS, KV_HEADS, DIM = 3 * 2**18, 256, 32, 8, 128
NAMES = ("flash_attn_4", "cudnn", "torch_flash")
assert LONG * HEADS * DIM > 2**31


def tensors(tokens: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (1, tokens, heads, DIM)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def wanted(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """[out, dq, dk, dv] of some rows, in float32 by autograd."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in leaves[1:])
    scores = torch.einsum("blhd,bmhd->bhlm", leaves[0], keys) * DIM**-0.5
    out = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]


def run_both(name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) where every query sees every key; skips where the kernel is missing."""
    kernel = available()[name]
    request = KernelRequest("cuda", torch.bfloat16, DIM, num_heads=HEADS, num_kv_heads=KV_HEADS)
    reason = kernel.refuses(request)
    if reason is not None:
        pytest.skip(reason)
    rows, columns = q.shape[1], k.shape[1]
    segments, score = Segments((rows,), (columns,), FULL_WINDOW), Score(DIM**-0.5)
    call = Call((Interval(0, rows),), (Interval(0, columns),), segments)
    out, lse = run.run_forward(kernel, call, q, k, v, score)
    given = BackwardInputs(dout, q, k, v, out, lse)
    return out, *run.run_backward(kernel, call, given, score)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [1, 4])
def test_long_queries(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries of few keys: dout is 0 but for the last queries, at which results are right."""
    monkeypatch.setattr(run, "num_head_parts", lambda q, k: parts)
    q = tensors(LONG, HEADS, 0)
    k, v = (tensors(SHORT, KV_HEADS, seed) for seed in (1, 2))
    dout = torch.zeros_like(q)
    last = slice(LONG - 200, LONG)
    dout[:, last] = tensors(200, HEADS, 3)
    if (name, parts) == ("cudnn", 1):
        with pytest.raises(ValueError, match="its gradients are wrong beyond"):
            run_both(name, q, k, v, dout)
        return
    out, dq, dk, dv = run_both(name, q, k, v, dout)
    right = wanted(q[:, last], k, v, dout[:, last])
    for found, reference in zip((out[:, last], dq[:, last], dk, dv), right, strict=True):
        assert relative_error(found, reference) < 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_long_keys(name: str) -> None:
    """Few queries of many keys, head by head."""
    q, dout = tensors(SHORT, HEADS, 0), tensors(SHORT, HEADS, 3)
    k, v = (tensors(LONG, HEADS, seed) for seed in (1, 2))
    results = run_both(name, q, k, v, dout)
    for head in range(0, HEADS, 5):
        one = slice(head, head + 1)
        right = wanted(*(x[:, :, one] for x in (q, k, v, dout)))
        for found, reference in zip(results, right, strict=True):
            assert relative_error(found[:, :, one], reference) < 2e-2
