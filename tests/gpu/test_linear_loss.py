"""The chunked linear cross-entropy on CUDA: its error and memory; the host awaits nothing."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.loss.linear_cross_entropy import linear_cross_entropy, linear_scores
from tests.loss.test_linear_cross_entropy import Inputs, Variant
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, WORDS = 4096, 256, 32000
CHUNK_BYTES = 16 * 2**20
"""All logits in float32 would take 524 MB."""


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda")
    weight = torch.randn(WORDS, WIDTH, generator=generator, device="cuda") / 16
    labels = torch.randint(WORDS, (TOKENS,), generator=generator, device="cuda")
    labels[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def results(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss / TOKENS, leaves)]


def has_at_most_twice_the_error(
    leaves: list[Tensor],
    labels: Tensor,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    softcap: float | None = None,
    scale: float = 1.0,
) -> None:
    """Compare with full logits in float64; `leaves` are hidden, weight and perhaps bias."""

    def through_full_logits(given: list[Tensor]) -> list[Tensor]:
        bias = given[2] if len(given) > 2 else None
        whole = Inputs(given[0][None], given[1], bias, labels[None])
        return results(Variant(softcap, scale).losses(whole).sum(), *given)

    wanted = through_full_logits([leaf.detach().double().requires_grad_() for leaf in leaves])
    stock = through_full_logits(leaves)
    bias = leaves[2] if len(leaves) > 2 else None
    how: dict[str, Any] = {"softcap": softcap, "scale": scale, "chunk_bytes": chunk_bytes}
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, bias=bias, **how)
    assert loss.dtype == torch.float32
    found = results(loss, *leaves)
    errors = [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
    of_stock = [relative_error(a, b) for a, b in zip(stock, wanted, strict=True)]
    assert errors[0] < 1e-5, "logits are not rounded to the dtype of the products"
    assert all(a <= 2 * b + 1e-6 for a, b in zip(errors[1:], of_stock[1:], strict=True))


VARIANTS = [{}, {"softcap": 4.0}, {"scale": 0.3, "bias": True}, {"softcap": 4.0, "bias": True}]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_at_most_twice_that_of_full_logits(
    dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    """This holds too where a bias of -inf removes every seventh word (none is a label)."""
    options = dict(variant)
    *leaves, labels = inputs(dtype)
    if options.pop("bias", False):
        torch.manual_seed(1)
        bias = torch.randn(WORDS, device="cuda", dtype=dtype)
        bias[::7] = float("-inf")
        labels = labels.where((labels < 0) | (labels % 7 > 0), 1)
        leaves.append(bias.requires_grad_())
    has_at_most_twice_the_error(leaves, labels, **options)


@pytest.mark.parametrize("num_words", [1, 7, 128_259])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_one_token_and_any_number_of_words(dtype: torch.dtype, num_words: int) -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(3, 40, device="cuda") / 6).to(dtype).requires_grad_()
    weight = torch.randn(num_words, 40, device="cuda").to(dtype).requires_grad_()
    labels = torch.tensor([num_words - 1, -100, num_words // 2], device="cuda")
    if num_words == 1:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=1)
        assert not any(result.any() for result in results(loss, hidden, weight))
        return
    has_at_most_twice_the_error([hidden, weight], labels, chunk_bytes=1)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_segments_and_means_of_logits(softcap: float | None) -> None:
    """Each segment has its own gradient; the bounds are those of bfloat16 and of float32."""
    hidden, weight, labels = inputs(torch.bfloat16)
    sizes, numbers = (1001, 3095), torch.tensor([0.5, -2.0], device="cuda")
    factors = numbers.repeat_interleave(torch.tensor(sizes, device="cuda"))
    scores = linear_scores(
        hidden,
        weight,
        labels,
        softcap=softcap,
        chunk_bytes=CHUNK_BYTES,
        segments=sizes,
        with_mean_logits=True,
    )
    found = torch.autograd.grad(scores.losses, (hidden, weight), factors)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logits = F.linear(*wide)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, labels, reduction="none")
    wanted = torch.autograd.grad((factors * losses).sum(), wide)
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(found, wanted, strict=True))
    means = logits.detach().mean(-1).where(labels >= 0, 0)
    assert relative_error(scores.mean_logits, means) < 1e-3


ROWS = [(1, 1.0), (7, 1.0), (4096, 1.0), (4097, 1e4), (128_259, 1.0), (128_259, 1e4)]
"""Numbers of words, and sizes of the logits."""


@pytest.mark.parametrize(("num_words", "size"), ROWS)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_have_the_error_of_rounding(
    dtype: torch.dtype, softcap: float | None, num_words: int, size: float
) -> None:
    """The fused kernel alone on given logits; rows 1 and 3 have no label, and row 3 is NaN."""
    from longctx_patch.loss.fused_softmax import softmax_scores

    generator = torch.Generator("cuda").manual_seed(0)
    logits = size * torch.randn(4, num_words, generator=generator, device="cuda")
    logits[2, : num_words - 1] = float("-inf")
    logits[3] = float("nan")
    labels = torch.tensor([num_words // 2, -100, num_words - 1, -100], device="cuda")
    labels = torch.stack([labels, labels + 1], 1)[:, 0]  # with a stride
    wide = logits.double().requires_grad_()
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    wanted_losses = F.cross_entropy(capped, labels, reduction="none")
    (wanted,) = torch.autograd.grad(wanted_losses[:3].sum(), wide)
    kept = logits.clone()
    how: dict[str, Any] = {"softcap": softcap, "scale": 1.0}
    alone, _ = softmax_scores(logits, labels, **how, grad_dtype=None, with_statistics=True)
    assert torch.equal(logits[:3], kept[:3]), "without a gradient logits are left alone"
    fewer, _ = softmax_scores(logits.clone(), labels, **how, grad_dtype=dtype)
    scores, grads = softmax_scores(logits, labels, **how, grad_dtype=dtype, with_statistics=True)
    losses = scores.losses
    assert torch.equal(scores.is_top1, alone.is_top1)
    # Each variant is compiled on its own, which may add in another order.
    for one, other in zip((fewer.losses, *alone[:2]), (losses, *scores[:2]), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
    probs = capped.detach().softmax(-1)
    is_valid = labels >= 0
    entropy = torch.special.entr(probs).sum(-1).where(is_valid, 0)
    assert torch.allclose(scores.entropy.double(), entropy, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.is_top1, is_valid & (capped.detach().argmax(-1) == labels))
    assert torch.allclose(losses.double(), wanted_losses.detach(), rtol=1e-6, atol=1e-6)
    assert grads is not None
    assert grads.dtype == dtype
    assert grads.data_ptr() == logits.data_ptr()
    assert not grads[[1, 3]].any()
    distance = (grads[:3] - wanted[:3]).norm()
    of_rounding = (wanted[:3].to(dtype) - wanted[:3]).norm()
    # Where most logits are capped, gradients are tiny and only their first digits are right.
    is_capped = softcap is not None and size > softcap
    allowed = 1e-4 * wanted[:3].norm() if is_capped else 2e-6 * (1 + wanted[:3].norm())
    assert distance <= 2 * of_rounding + allowed


def test_a_row_without_label_may_hold_anything() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    broken = hidden.detach().masked_fill(labels[:, None] == -100, float("nan")).requires_grad_()
    wanted = results(linear_cross_entropy(hidden, weight, labels), hidden, weight)
    found = results(linear_cross_entropy(broken, weight, labels), broken, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_without_gradients_there_is_the_same_loss() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_takes_the_memory_of_its_logits_alone(
    dtype: torch.dtype, softcap: float | None
) -> None:
    """The weight is frozen, because its gradient would hide what a chunk takes."""
    hidden, weight, labels = inputs(dtype)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels, softcap=softcap, chunk_bytes=CHUNK_BYTES)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels, softcap=softcap, chunk_bytes=CHUNK_BYTES)
    gradient = hidden.numel() * hidden.element_size()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * CHUNK_BYTES + gradient


WRONG_LABEL = """
import torch
from longctx_patch.loss.linear_cross_entropy import linear_cross_entropy
hidden, weight = torch.ones(4, 8, device="cuda"), torch.ones(7, 8, device="cuda")
linear_cross_entropy(hidden, weight, torch.tensor([1, 7, 2, 3], device="cuda")).item()
"""


def test_a_wrong_label_ends_in_an_assertion() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRONG_LABEL], check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


def test_nothing_is_waited_for() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_inputs_give_the_same_bits() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    first, second = (
        results(
            linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK_BYTES), hidden, weight
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
