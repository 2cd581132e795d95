"""The chunked linear cross-entropy agrees with F.cross_entropy on full logits in float64."""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx_patch.loss import linear_head
from longctx_patch.loss.label_scores import Scores
from longctx_patch.loss.linear_cross_entropy import linear_cross_entropy, linear_scores
from tests.reference import relative_error

TOKENS, WIDTH, WORDS = (3, 17), 16, 41
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6}


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


class Variant(NamedTuple):
    """What happens to logits."""

    softcap: float | None = None
    scale: float = 1.0
    has_bias: bool = False

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Random inputs, in which some tokens have no label."""
        torch.manual_seed(0)
        hidden, weight = torch.randn(*TOKENS, WIDTH), torch.randn(WORDS, WIDTH)
        labels = torch.randint(WORDS, TOKENS)
        labels[0, 2:9], labels[2] = -100, -100
        bias = torch.randn(WORDS) if self.has_bias else None
        return leaves(Inputs(hidden, weight, bias, labels), dtype)

    def logits(self, given: Inputs) -> Tensor:
        """`[tokens, words]`."""
        logits = self.scale * F.linear(given.hidden, given.weight, given.bias).flatten(0, 1)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def losses(self, given: Inputs, labels: Tensor | None = None) -> Tensor:
        """Returns the numbers of each token, by full logits in at least float32."""
        logits = self.logits(given)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = given.labels if labels is None else labels
        return F.cross_entropy(wide, labels.flatten(), reduction="none")

    def scores(self, given: Inputs, tokens_of_chunk: int, **options: Any) -> Scores:
        options = {"labels": given.labels, "softcap": self.softcap, "scale": self.scale} | options
        size = 4 * WORDS * tokens_of_chunk
        return linear_scores(*given[:2], bias=given.bias, chunk_bytes=size, **options)


PLAIN = Variant()
VARIANTS = [
    PLAIN,
    Variant(scale=0.3),
    Variant(softcap=2.0),
    Variant(has_bias=True),
    Variant(softcap=1.5, scale=0.7, has_bias=True),
]
CHUNKS = [1, 7, 51]
"""Tokens of a chunk at most: one; 7, so that chunks are of unequal size; all at once."""


def leaves(given: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers in another dtype, as leaves that require gradients."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in given[:2])
    bias = None if given.bias is None else given.bias.detach().to(dtype).requires_grad_()
    return Inputs(hidden, weight, bias, given.labels)


def gradients(loss: Tensor, given: Inputs) -> list[Tensor]:
    (3 * loss).backward()  # so that the gradient of the loss is not 1
    found = [leaf.grad for leaf in given[:3] if leaf is not None]
    assert all(grad is not None for grad in found)
    return [loss.detach(), *found]  # type: ignore[list-item]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]


def errors_of_full_logits(variant: Variant, dtype: torch.dtype) -> list[float]:
    plain = variant.inputs(dtype)
    return errors(gradients(variant.losses(plain).sum(), plain), exact(variant, dtype))


def exact(variant: Variant, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients of inputs in this dtype, computed in float64."""
    wide = leaves(variant.inputs(dtype), torch.float64)
    return gradients(variant.losses(wide).sum(), wide)


@pytest.mark.parametrize(
    ("dtype", "variant", "tokens_of_chunk"),
    [
        (dtype, variant, CHUNKS[(turn + number) % 3])
        for turn, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16])
        for number, variant in enumerate(VARIANTS)
    ],
)
def test_loss_and_gradients(dtype: torch.dtype, variant: Variant, tokens_of_chunk: int) -> None:
    """They agree with float64; in bfloat16 their error is at most twice that of full logits."""
    given = variant.inputs(dtype)
    loss = linear_cross_entropy(
        *given[:2],
        given.labels,
        bias=given.bias,
        softcap=variant.softcap,
        scale=variant.scale,
        chunk_bytes=4 * WORDS * tokens_of_chunk,
    )
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    found = gradients(loss, given)
    assert [grad.dtype for grad in found[1:]] == [dtype] * len(found[1:])
    loss_error, *others = errors(found, exact(variant, dtype))
    if dtype in BOUNDS:
        assert max(loss_error, *others) < BOUNDS[dtype]
        return
    assert loss_error < 1e-3, "of a single number, which may happen to be near"
    stock = errors_of_full_logits(variant, dtype)[1:]
    assert all(a <= 2 * b for a, b in zip(others, stock, strict=True))


def half_rows(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    softcap: float | None,
    scale: float,
    grad_dtype: torch.dtype | None,
    with_statistics: bool,
) -> tuple[Scores, Tensor | None]:
    """The fused kernel's results; gradients are written into the first half of logits' rows."""
    assert not with_statistics
    scaled = (scale * logits_CV.double()).requires_grad_()
    with torch.enable_grad():
        capped = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
        losses = F.cross_entropy(capped, labels_C, reduction="none")
        (exact_grads,) = torch.autograd.grad(losses.sum(), scaled)
    if grad_dtype is None:
        return Scores.of_losses(losses.float()), None
    grads = logits_CV.view(grad_dtype)[:, : logits_CV.shape[1]]
    return Scores.of_losses(losses.float()), grads.copy_(exact_grads)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_the_fused_kernel(
    dtype: torch.dtype, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are right where torch stands in for the fused kernel (see tests/gpu)."""
    name = "longctx_patch.loss.fused_softmax"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(softmax_scores=half_rows))
    monkeypatch.setattr(linear_head, "fits_fused", lambda *_: True)
    monkeypatch.setattr(linear_head, "runs_triton", lambda: True)
    test_loss_and_gradients(dtype, variant, tokens_of_chunk=7)


class Work(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns (of those of a given
    `width`), and products of matrices and their multiply-adds."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.numel = self.products = self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.products += 1
            self.multiply_adds += a.shape[0] * a.shape[1] * b.shape[1]
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and self.width in (None, *made.shape[-1:]):
                self.numel = max(self.numel, made.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_never_holds_all_logits(dtype: torch.dtype, softcap: float | None) -> None:
    """The largest tensor is the logits of a chunk: 4 of 64 tokens times 500 words."""
    hidden = torch.randn(64, 2, dtype=dtype, requires_grad=True)
    weight = torch.randn(500, 2, dtype=dtype, requires_grad=True)
    with Work() as work:
        loss = linear_cross_entropy(
            hidden, weight, torch.randint(500, (64,)), softcap=softcap, chunk_bytes=4 * 4 * 500
        )
        loss.backward()
    assert work.numel == 4 * 500
    assert work.products == 3 * 16


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_tokens(variant: Variant) -> None:
    """Losses, entropy and hits are those of full logits, and so are gradients of a mean."""
    given, plain = variant.inputs(), variant.inputs()
    logits = variant.logits(plain)
    best = logits.argmax(-1).view(TOKENS)
    labels = given.labels.clone()
    labels[:, ::2] = best[:, ::2].where(labels[:, ::2] >= 0, -100)
    is_valid = labels.flatten() >= 0
    scores = variant.scores(given, 7, labels=labels, with_mean_logits=True)
    assert torch.allclose(scores.mean_logits, logits.mean(-1).where(is_valid, 0))
    losses = variant.losses(plain, labels)
    assert torch.allclose(scores.losses, losses)
    entropy = torch.distributions.Categorical(logits=logits).entropy().where(is_valid, 0)
    assert torch.allclose(scores.entropy, entropy)
    assert torch.equal(scores.is_top1, best.flatten() == labels.flatten())
    assert 0 < scores.is_top1.sum() < is_valid.sum()
    weights = torch.where(is_valid, 1.0, torch.arange(len(losses)))  # those of no label don't count
    found = gradients((weights * scores.losses).sum() / 7, given)
    assert max(errors(found, gradients(losses.sum() / 7, plain))) < 1e-13
    with torch.no_grad():
        alone = variant.scores(given, 7, labels=labels, with_mean_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(alone, scores, strict=True))


def test_the_first_of_equal_words_is_the_likeliest() -> None:
    hidden, weight = torch.ones(3, 1), torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    assert linear_scores(hidden, weight, torch.tensor([1, 2, 3])).is_top1.tolist() == [True, 0, 0]


SEGMENTS = [None, (17, 34), (0, 20, 31), (51, 0), (3, 0, 6, 42), (17, 17, 17)]
"""None: the head is frozen, so each token may have a gradient of its own. The first of the others
have tokens without a label, some segments have no token, and the last no label."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", SEGMENTS)
def test_tokens_or_segments_have_gradients_of_their_own(
    variant: Variant, sizes: tuple[int, ...] | None
) -> None:
    """What comes back for tokens without a label is not even read."""
    for tokens_of_chunk in CHUNKS:
        given, plain = variant.inputs(), variant.inputs()
        for head in (*given[1:3], *plain[1:3]):
            if head is not None:
                head.requires_grad_(sizes is not None)
        each = torch.tensor(sizes or [1] * given.labels.numel())
        weights = torch.linspace(-1, 2, len(each), dtype=torch.float64).repeat_interleave(each)
        weights = weights.where(given.labels.flatten() >= 0, torch.nan)
        with Work() as work:
            losses = variant.scores(given, tokens_of_chunk, segments=sizes).losses
            losses.backward(weights)
        products = 2 if sizes is None else 3
        assert work.multiply_adds == products * len(losses) * WIDTH * WORDS
        (weights.nan_to_num(0) * variant.losses(plain)).sum().backward()
        for leaf, other in zip(given[:3], plain[:3], strict=True):
            if leaf is not None and leaf.requires_grad:
                assert leaf.grad is not None
                assert relative_error(leaf.grad, other.grad) < 1e-13  # type: ignore[arg-type, union-attr]


def test_different_gradients_of_tokens_are_refused() -> None:
    for segments in (None, (17, 34)):
        given = PLAIN.inputs()
        losses = linear_scores(*given[:2], given.labels, segments=segments).losses
        with pytest.raises(RuntimeError, match=r"different gradients.*token_log_probs"):
            (losses * torch.linspace(1, 2, len(losses))).sum().backward()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_loss_that_is_no_number_has_gradients_that_are_none(number: float) -> None:
    """They are alike, so they are handed on as one process would."""
    given = PLAIN.inputs()
    losses = linear_scores(*given[:2], given.labels, segments=(17, 34)).losses
    (losses.sum() * number).backward()
    assert given.weight.grad is not None
    assert not given.weight.grad.isfinite().any()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("hidden", "weight"), [(True, False), (False, True), (False, False)])
def test_what_is_frozen_costs_no_product(hidden: bool, weight: bool, enabled: bool) -> None:
    given, both = PLAIN.inputs(), PLAIN.inputs()
    given.hidden.requires_grad_(hidden)
    given.weight.requires_grad_(weight)
    hidden, weight = hidden and enabled, weight and enabled
    with torch.set_grad_enabled(enabled), Work() as counter:
        loss = linear_cross_entropy(*given[:2], given.labels)
    assert counter.products == 1 + hidden + weight
    assert loss.requires_grad == (hidden or weight)
    whole = linear_cross_entropy(*both[:2], both.labels)
    assert torch.equal(loss, whole)
    whole.backward()
    if loss.requires_grad:
        loss.backward()
    assert [given.hidden.grad is not None, given.weight.grad is not None] == [hidden, weight]
    for part, other in ((given.hidden, both.hidden), (given.weight, both.weight)):
        assert part.grad is None or torch.equal(part.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_valid_label_is_an_exact_zero(num_tokens: int) -> None:
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((num_tokens,), -100))
    loss.backward()
    assert loss.item() == 0
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_logits_that_are_far_apart() -> None:
    """Loss and gradient are right where the softmax of a label underflows."""
    hidden = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 600
    assert hidden.grad is not None
    assert hidden.grad.item() == 2


def test_autocast_multiplies_in_its_dtype() -> None:
    given, plain = PLAIN.inputs(torch.float32), PLAIN.inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*given[:2], given.labels)
        stock = PLAIN.losses(plain).sum()
    wanted = exact(PLAIN, torch.float32)
    loss_error, *others = errors(gradients(loss, given), wanted)
    of_stock = errors(gradients(stock, plain), wanted)[1:]
    assert max(others) > 1e-4, "it did multiply in bfloat16"
    assert all(a <= 2 * b for a, b in zip(others, of_stock, strict=True))
    assert loss_error < 1e-3
    assert all(leaf.grad.dtype == torch.float32 for leaf in given[:2])  # type: ignore[union-attr]


def test_a_second_backward_is_refused() -> None:
    given = PLAIN.inputs()
    loss = linear_cross_entropy(*given[:2], given.labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward .*loss='logits'"):
        loss.backward()


def test_shapes_and_numbers_that_can_not_be_right() -> None:
    hidden, weight, _, labels = PLAIN.inputs()
    for label in (WORDS, -1):
        with pytest.raises(ValueError, match=rf"label {label}: labels are from 0 to {WORDS - 1}"):
            linear_cross_entropy(hidden, weight, labels.clone().fill_(label))
    with pytest.raises(ValueError, match=r"labels \(51,\)"):
        linear_cross_entropy(hidden, weight, labels.flatten())
    with pytest.raises(ValueError, match=r"bias \(3,\)"):
        linear_cross_entropy(hidden, weight, labels, bias=torch.ones(3))
    with pytest.raises(ValueError, match="segments of 50 tokens for 51 labels"):
        linear_scores(hidden, weight, labels, segments=(20, 30))
    with pytest.raises(ValueError, match="softcap=0"):
        linear_cross_entropy(hidden, weight, labels, softcap=0.0)
    with pytest.raises(ValueError, match="chunk_bytes=0"):
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=0)
