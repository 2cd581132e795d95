"""What ranks return of whole rows beside a loss, TRL's per-token fields and logits, is what the
stock model returns of them in one process, and so are the gradients of what is computed of it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.data.whole_rows import HeadScores
from tests.hf.row_batches import BATCHES, DOCUMENTS, LENGTHS, Batch
from tests.hf.steps import Step, complaints, on_ranks, reduced
from tests.hf.tiny import VOCABULARY, featured_model, gradients
from tests.reference import relative_error

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TWO = LongContextConfig(ring_degree=2)
LossOf = Callable[[Any], Tensor]


class Products(TorchDispatchMode):
    """Multiply-adds of each matrix product with as many rows or columns as there are words."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            (num_rows, num_terms), num_columns = args[-2].shape, args[-1].shape[1]
            work = num_rows * num_terms * num_columns
            if work and VOCABULARY in (num_rows, num_terms, num_columns):
                self.work.append(work)
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> float:
        """How many products of the first one's size there are."""
        return sum(self.work) / self.work[0] if self.work else 0.0


class Ran(NamedTuple):
    outputs: dict[str, Tensor]
    step: Step
    products: float


def ran(model: Any, given: dict[str, Any], loss_of: LossOf) -> Ran:
    model.zero_grad()
    with Products() as products:
        outputs = model(**given, fused_lm_head=True, use_cache=False)
        loss = loss_of(outputs)
        loss.backward()
    values = {name: value.detach() for name, value in outputs.items() if name != "past_key_values"}
    return Ran(values, Step(loss.detach(), gradients(model)), products.number)


def compare(
    model: Any,
    given: dict[str, Any],
    loss_of: LossOf,
    *,
    scores: Callable[[], HeadScores] | None = None,
    refused: LossOf | None = None,
    patched_last: bool = False,
    config: LongContextConfig = TWO,
    **options: Any,
) -> list[float]:
    """All fields and gradients, and the numbers of products on the ranks. `scores`: what the head
    makes in forward; then a loss that needs other gradients is `refused`."""
    stock = copy.deepcopy(model)
    add_fused_lm_head(stock, **options)
    wanted = ran(stock, given, loss_of)

    def run(model: Any, handle: PatchHandle) -> Ran:
        if patched_last:
            handle.unpatch()
        add_fused_lm_head(model, **options)
        if patched_last:
            handle = patch(model, config, group=handle.group)
        if scores is not None:
            handle._rows.head_scores = scores
        found = ran(model, given, loss_of)
        if refused is not None:
            outputs = model(**given, fused_lm_head=True, use_cache=False)
            with pytest.raises(RuntimeError, match=r"different gradients.*token_log_probs"):
                refused(outputs).backward()
        return found

    ranks = on_ranks(model, config, run)
    where = (model.config.model_type, options, scores)
    for rank in ranks:
        assert wanted.outputs.keys() <= rank.outputs.keys()
        assert scores or wanted.outputs.keys() == rank.outputs.keys()
        for name, values in wanted.outputs.items():
            found = rank.outputs[name]
            assert (found.shape, found.dtype) == (values.shape, values.dtype)
            assert relative_error(found, values) < 1e-5, (where, name)
    assert not complaints(reduced([rank.step for rank in ranks]), wanted.step, where)
    return [rank.products for rank in ranks]


def with_router(family: str, given: dict[str, Any]) -> dict[str, Any]:
    return given | ({"output_router_logits": True} if family == "mixtral" else {})


def with_aux(loss: Tensor, outputs: Any) -> Tensor:
    return loss if outputs.get("aux_loss") is None else loss + 0.1 * outputs.aux_loss


def loss_of_all(outputs: Any) -> Tensor:
    weights = torch.linspace(-1, 2, outputs.log_probs.numel()).view_as(outputs.log_probs)
    loss = (weights * outputs.log_probs).sum() + 0.3 * outputs.entropy.square().mean()
    return with_aux(loss + outputs.loss, outputs)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
def test_every_field(family: str, kind: str) -> None:
    """With TRL's head before the patch or after it."""
    given, last = with_router(family, BATCHES[kind].given), family in ("gemma2", "mixtral")
    model = featured_model(family)
    compare(model, given, loss_of_all, patched_last=last, temperature=0.8, outputs=FIELDS)


def loss_of_sum(outputs: Any) -> Tensor:
    return with_aux(-outputs.log_probs.sum() / 7, outputs)


def loss_of_places(outputs: Any) -> Tensor:
    return (outputs.log_probs * torch.arange(1, 1 + outputs.log_probs.shape[1])).sum()


def loss_of_rows(outputs: Any) -> Tensor:
    """One gradient for all tokens of a row, and another for each row."""
    gains = outputs.log_probs.sum(1) * torch.tensor([0.1, 0.2, 0, -0.1])
    return -torch.nn.functional.logsigmoid(gains).sum()


def loss_of_tokens(outputs: Any) -> Tensor:
    weights = torch.linspace(-1, 2, outputs.log_probs.numel()).view_as(outputs.log_probs)
    return (weights * outputs.log_probs).exp().sum()


def frozen_head(model: Any) -> Any:
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_gradients_that_the_head_makes_in_forward(family: str) -> None:
    """Where log-probabilities are only summed, over all rows or in each row, or the head is frozen,
    none of its products is computed again in backward."""
    fields: dict[str, Any] = {"outputs": ("log_probs", "entropy", "is_top1")}
    for batch in BATCHES.values():
        given = with_router(family, batch.given)
        model = featured_model(family)
        made = compare(
            model, given, loss_of_sum, scores=HeadScores, refused=loss_of_places, **fields
        )
        assert made == [3, 3]
    fields = {"outputs": ("log_probs", "entropy", "mean_logits", "is_top1")}
    for side in ("right", "left"):
        given = BATCHES[side].given
        by_row = partial(HeadScores, True, with_mean_logits=True)
        made = compare(model, given, loss_of_rows, scores=by_row, refused=loss_of_tokens, **fields)
        assert made == [3, 3]
        each = partial(HeadScores, False, with_mean_logits=True)
        frozen = frozen_head(featured_model(family))
        assert compare(frozen, given, loss_of_tokens, scores=each, **fields) == [2, 2]


def test_a_hook_that_may_see_logits_leaves_scores_to_trls_head() -> None:
    model = featured_model("llama")
    handle = patch(model, LongContextConfig())
    handle._rows.head_scores = HeadScores
    add_fused_lm_head(model)
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    with Products() as counter:
        given = BATCHES["right"].given
        model(**given, fused_lm_head=True, use_cache=False).loss.backward()
    assert len(counter.work) > 3


def test_rows_without_labels() -> None:
    """A rank has labels of the second row only, and the other one none."""
    given = dict(BATCHES["right"].given)
    given["labels"] = torch.full_like(given["labels"], -100)
    given["labels"][1, :3] = given["input_ids"][1, :3]
    config = LongContextConfig(ulysses_degree=2, layout="contiguous")

    def loss_of(outputs: Any) -> Tensor:
        return outputs.log_probs.sum(1).square().sum()

    scores = partial(HeadScores, by_row=True)
    compare(featured_model("llama"), given, loss_of, scores=scores, config=config)


def test_evaluation() -> None:
    given = BATCHES["left"].given | {"fused_lm_head": True, "num_items_in_batch": 31}
    stock = featured_model("llama").eval()
    plain = copy.deepcopy(stock)
    add_fused_lm_head(stock)
    wanted = stock(**given)

    def evaluate(model: Any, handle: PatchHandle) -> None:
        add_fused_lm_head(model)
        with handle.sharing_evaluation():
            found = model(**given)
        for outputs in (found, model(**given)):
            assert relative_error(outputs.log_probs, wanted.log_probs) < 1e-5
            assert relative_error(outputs.loss, wanted.loss) < 1e-5

    with torch.inference_mode():
        on_ranks(plain, LongContextConfig(ulysses_degree=2), evaluate)


def stock_logits(model: Any, batch: Batch) -> Tensor:
    """Logits of whole rows, from each document alone; 0 on padding and on filled places."""
    shape = batch.given["input_ids"].shape
    parts = []
    for (row, first), (ids, _) in zip(batch.places, DOCUMENTS, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        whole = logits.new_zeros(*shape, logits.shape[-1])
        columns = torch.arange(first, first + len(ids))
        parts.append(whole.index_put((torch.tensor(row), columns), logits))
    return torch.stack(parts).sum(0)


def has_document(batch: Batch) -> Tensor:
    found = torch.zeros(batch.given["input_ids"].shape)
    for (row, first), length in zip(batch.places, LENGTHS, strict=True):
        found[row, first : first + length] = 1
    return found[..., None]


KEPT: tuple[Any, ...] = (None, 0, 1, 11, 1000, [3, -2, 20, 3])
LOGITS = LongContextConfig(ring_degree=2, loss="logits")


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("kind", BATCHES)
def test_logits_of_chosen_columns(kind: str, kept: Any) -> None:
    batch, stock = BATCHES[kind], featured_model("gemma2" if kept == 11 else "llama")
    kept = torch.tensor(kept) if isinstance(kept, list) else kept
    given = batch.given | {"labels": None, "logits_to_keep": kept}
    columns = slice(-kept, None) if isinstance(kept, int) else kept
    columns = slice(None) if columns is None else columns

    def step(model: Any, logits: Tensor) -> tuple[Tensor, Step]:
        loss = (logits.softmax(-1)[..., 5] ** 2).sum()
        loss.backward()
        return logits.detach(), Step(loss.detach(), gradients(model))

    def run(model: Any, handle: PatchHandle) -> tuple[Tensor, Step]:
        return step(model, model(**given).logits * has_document(batch)[:, columns])

    ranks = on_ranks(stock, LOGITS, run)
    logits, wanted = step(stock, stock_logits(stock, batch)[:, columns])
    assert relative_error(ranks[0][0], logits) < 1e-5
    assert not complaints(reduced([found for _, found in ranks]), wanted, kept)


def test_refusals() -> None:
    batch = BATCHES["right"].given | {"labels": None}

    def refuse(model: Any, handle: PatchHandle) -> None:
        for kept in (-1, True, 1.5, torch.tensor([30]), torch.tensor([[1]]), torch.tensor([True])):
            with pytest.raises(ValueError, match=r"logits_to_keep=.* for rows of 30 tokens"):
                model(**batch, logits_to_keep=kept)
        with pytest.raises(ValueError, match=r"for logits of columns \[28, 29\]\n"):
            model(**batch, logits_to_keep=2 + handle.group_rank)

    def refuse_chunked(model: Any, handle: PatchHandle) -> None:
        with pytest.raises(ValueError, match=r"handle.token_log_probs\(batch\).*loss='logits'"):
            model(**batch)
        with pytest.raises(ValueError, match="fused_lm_head=True with a sharded batch: attention"):
            model(**BATCHES["right"].given, fused_lm_head=True)  # without TRL's head

    on_ranks(featured_model("llama"), LOGITS, refuse)
    on_ranks(featured_model("llama"), TWO, refuse_chunked)
