"""The chunked linear cross-entropy on CUDA: its error, its memory, and that nothing is awaited."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.linear_loss import linear_cross_entropy
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, WORDS = 4096, 256, 32000
CHUNK_BYTES = 16 * 2**20
"""Of 524 MB for all logits in float32."""


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda")
    weight = torch.randn(WORDS, WIDTH, generator=generator, device="cuda") / 16
    labels = torch.randint(WORDS, (TOKENS,), generator=generator, device="cuda")
    labels[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def full_loss(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum")


def results(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss / TOKENS, leaves)]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_at_most_twice_that_of_full_logits(
    dtype: torch.dtype, softcap: float | None
) -> None:
    hidden, weight, labels = inputs(dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    wanted = results(full_loss(*wide, labels, softcap), *wide)
    stock = results(full_loss(hidden, weight, labels, softcap), hidden, weight)
    loss = linear_cross_entropy(hidden, weight, labels, softcap=softcap, chunk_bytes=CHUNK_BYTES)
    assert loss.dtype == torch.float32
    found = results(loss, hidden, weight)
    errors = [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
    of_stock = [relative_error(a, b) for a, b in zip(stock, wanted, strict=True)]
    assert errors[0] < 1e-5, "logits are not rounded to the dtype of the products"
    assert all(a <= 2 * b + 1e-6 for a, b in zip(errors[1:], of_stock[1:], strict=True))


def test_memory_is_that_of_a_chunk_and_nothing_is_waited_for() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradients = (4 + 2) * (hidden.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before < 3 * CHUNK_BYTES + gradients


def test_the_same_inputs_give_the_same_bits() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    first, second = (
        results(
            linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES), hidden, weight
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
