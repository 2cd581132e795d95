"""What ranks return of whole rows beside a loss, TRL's per-token fields and logits, is what the
stock model returns of them in one process, and so are the gradients of what is computed of it."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from longctx_patch import LongContextConfig, patch
from longctx_patch.data.whole_rows import HeadScores
from tests.harness import run_distributed
from tests.hf.row_batches import BATCHES, DOCUMENTS, LENGTHS, Batch
from tests.hf.steps import Step, complaints, over_ranks
from tests.hf.tiny import VOCABULARY, featured_model, gradients
from tests.reference import relative_error

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ROUTED = ("mixtral", "qwen3_moe")


def fused_pass(model: Any, given: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """All fields, and a loss of somebody else's making."""
    outputs = model(**given, fused_lm_head=True, use_cache=False)
    weights = torch.linspace(-1, 2, outputs.log_probs.numel()).view_as(outputs.log_probs)
    loss = (weights * outputs.log_probs).sum() + 0.3 * outputs.entropy.square().mean()
    loss = loss + outputs.loss
    if outputs.get("aux_loss") is not None:
        loss = loss + 0.1 * outputs.aux_loss
    return dict(outputs), loss


def check_fused(rank: int) -> None:
    cases = [("llama", True), ("gemma2", False), ("granite", True), ("mixtral", False)]
    for (family, patched_first), (kind, batch) in product(cases, BATCHES.items()):
        given = batch.given | ({"output_router_logits": True} if family in ROUTED else {})
        stock, model = featured_model(family), featured_model(family)
        add_fused_lm_head(stock, temperature=0.8, outputs=FIELDS)
        config = LongContextConfig(ring_degree=2)
        if patched_first:
            patch(model, config)
            add_fused_lm_head(model, temperature=0.8, outputs=FIELDS)
        else:
            add_fused_lm_head(model, temperature=0.8, outputs=FIELDS)
            patch(model, config)
        wanted, expected = fused_pass(stock, given)
        found, loss = fused_pass(model, given)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert found[name].shape == values.shape
            assert found[name].dtype == values.dtype
            assert relative_error(found[name].detach(), values.detach()) < 1e-5, (family, name)
        expected.backward()
        loss.backward()
        step = over_ranks(loss, model)
        assert not complaints(step, Step(expected.detach(), gradients(stock)), (family, kind))


class Products(TorchDispatchMode):
    """Multiply-adds of each matrix product with as many rows or columns as there are words."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            (num_rows, num_terms), num_columns = args[-2].shape, args[-1].shape[1]
            if VOCABULARY in (num_rows, num_terms, num_columns):
                self.work.append(num_rows * num_terms * num_columns)
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> float:
        """Of products of the first one's size."""
        return sum(self.work) / self.work[0]


def check_sums(rank: int) -> None:
    """Where log-probabilities are only summed, the head makes their gradients in forward; with a
    hook that may see logits it leaves them to TRL's head."""
    config = LongContextConfig(ring_degree=2)
    for family, (kind, batch) in product(("llama", "gemma2", "mixtral"), BATCHES.items()):
        given = batch.given | ({"output_router_logits": True} if family in ROUTED else {})
        stock, model = featured_model(family), featured_model(family)
        fields = ("log_probs", "entropy", "is_top1")
        add_fused_lm_head(stock, outputs=fields)
        add_fused_lm_head(model, outputs=fields)
        handle = patch(model, config)
        handle._rows.head_scores = HeadScores
        results = []
        for each in (stock, model):
            with Products() as counter:
                outputs = each(**given, fused_lm_head=True, use_cache=False)
                loss = -outputs.log_probs.sum() / 7
                loss = loss if outputs.aux_loss is None else loss + 0.1 * outputs.aux_loss
                loss.backward()
            results.append((outputs, loss, counter.number))
        (wanted, expected, _), (found, loss, products) = results
        assert products == 3, "none of the head's products is computed again in backward"
        for name in (*fields, "label_mask", "loss"):
            assert found[name].dtype == wanted[name].dtype, name
            assert relative_error(found[name].detach(), wanted[name].detach()) < 1e-5, (kind, name)
        step = over_ranks(loss, model)
        assert not complaints(step, Step(expected.detach(), gradients(stock)), (family, kind))
        found = model(**given, fused_lm_head=True, use_cache=False)
        with pytest.raises(RuntimeError, match=r"different gradients.*token_log_probs"):
            (found.log_probs * torch.arange(1, 1 + found.log_probs.shape[1])).sum().backward()
        model.get_output_embeddings().register_forward_hook(lambda *_: None)
        with Products() as counter:
            model(**given, fused_lm_head=True, use_cache=False).loss.backward()
        assert len(counter.work) > 3
        handle.unpatch()


def loss_of_rows(log_probs: Tensor) -> Tensor:
    """One gradient for all tokens of a row, and another for each row."""
    return -torch.nn.functional.logsigmoid(
        log_probs.sum(1) * torch.tensor([0.1, 0.2, 0, -0.1])
    ).sum()


def loss_of_tokens(log_probs: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)
    return (weights * log_probs).exp().sum()


def check_rows_and_tokens(rank: int) -> None:
    """Gradients that are alike in each row, or with a frozen head nowhere, are made in forward."""
    fields = ("log_probs", "entropy", "mean_logits", "is_top1")
    families, sides = ("llama", "gemma2", "mixtral"), ("right", "left")
    for family, side, learns in product(families, sides, (True, False)):
        given = BATCHES[side].given
        stock, model = featured_model(family), featured_model(family)
        for each in (stock, model):
            add_fused_lm_head(each, outputs=fields)
            if not learns:
                each.requires_grad_(False)
                each.model.layers.requires_grad_(True)
        handle = patch(model, LongContextConfig(ring_degree=2))
        handle._rows.head_scores = partial(HeadScores, learns, with_mean_logits=True)
        of_log_probs = loss_of_rows if learns else loss_of_tokens
        wanted = stock(**given, fused_lm_head=True, use_cache=False)
        expected = of_log_probs(wanted.log_probs)
        expected.backward()
        with Products() as products:
            found = model(**given, fused_lm_head=True, use_cache=False)
            loss = of_log_probs(found.log_probs)
            loss.backward()
        assert products.number == (3 if learns else 2)
        for name in fields:
            assert found[name].dtype == wanted[name].dtype, name
            assert relative_error(found[name].detach(), wanted[name].detach()) < 1e-5, name
        step = over_ranks(loss, model)
        assert not complaints(step, Step(expected.detach(), gradients(stock)), (family, side))
        if learns:
            found = model(**given, fused_lm_head=True, use_cache=False)
            with pytest.raises(RuntimeError, match=r"different gradients.*token_log_probs"):
                loss_of_tokens(found.log_probs).backward()
        handle.unpatch()


def check_rows_without_labels(rank: int) -> None:
    """A rank has labels of the second row only, and the other one none."""
    given = dict(BATCHES["right"].given)
    given["labels"] = torch.full_like(given["labels"], -100)
    given["labels"][1, :3] = given["input_ids"][1, :3]
    stock, model = featured_model("llama"), featured_model("llama")
    config = LongContextConfig(ulysses_degree=2, layout="contiguous")
    handle = patch(model, config)
    handle._rows.head_scores = lambda: HeadScores(by_row=True)
    results = []
    for each in (stock, model):
        add_fused_lm_head(each)
        log_probs = each(**given, fused_lm_head=True, use_cache=False).log_probs
        results.append(log_probs.sum(1).square().sum())
        results[-1].backward()
    step = over_ranks(results[1], model)
    assert not complaints(step, Step(results[0].detach(), gradients(stock)), "one row")
    handle.unpatch()


def check_fused_evaluation(rank: int) -> None:
    given = BATCHES["left"].given
    stock, model = featured_model("llama").eval(), featured_model("llama").eval()
    add_fused_lm_head(stock)
    add_fused_lm_head(model)
    handle = patch(model, LongContextConfig(ulysses_degree=2))
    with torch.no_grad():
        wanted = stock(**given, fused_lm_head=True, num_items_in_batch=31)
        with handle.sharing_evaluation():
            found = model(**given, fused_lm_head=True, num_items_in_batch=31)
        alone = model(**given, fused_lm_head=True, num_items_in_batch=31) if rank else wanted
    for outputs in (found, alone):
        assert relative_error(outputs.log_probs, wanted.log_probs) < 1e-5
        assert relative_error(outputs.loss, wanted.loss) < 1e-5


def stock_logits(model: Any, batch: Batch) -> Tensor:
    """Of whole rows, from each document alone; 0 on padding and on filled places."""
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


KEPT: tuple[Any, ...] = (None, 0, 1, 11, 1000, torch.tensor([3, -2, 20, 3]))


def check_logits(rank: int) -> None:
    config = LongContextConfig(ring_degree=2, loss="logits")
    for family, (kind, batch), kept in product(("llama", "gemma2"), BATCHES.items(), KEPT):
        stock, model = featured_model(family), featured_model(family)
        patch(model, config)
        given = batch.given | {"labels": None, "logits_to_keep": kept}
        columns = slice(-kept, None) if isinstance(kept, int) else kept
        columns = slice(None) if columns is None else columns
        wanted = stock_logits(stock, batch)[:, columns]
        found = model(**given).logits * has_document(batch)[:, columns]
        assert relative_error(found.detach(), wanted.detach()) < 1e-5, (kind, kept)
        for logits in (wanted, found):
            (logits.softmax(-1)[..., 5] ** 2).sum().backward()
        step = over_ranks(torch.zeros(()), model)
        assert not complaints(step, Step(torch.zeros(()), gradients(stock)), (kind, kept))


def check_refusals(rank: int) -> None:
    batch = BATCHES["right"].given | {"labels": None}
    model = featured_model("llama")
    patch(model, LongContextConfig(ring_degree=2, loss="logits"))
    for kept in (-1, True, 1.5, torch.tensor([30]), torch.tensor([[1]]), torch.tensor([True])):
        with pytest.raises(ValueError, match=r"logits_to_keep=.* for rows of 30 tokens"):
            model(**batch, logits_to_keep=kept)
    with pytest.raises(ValueError, match=r"(?s)different outputs.*columns=\(28, 29\)"):
        model(**batch, logits_to_keep=2 + rank)
    chunked = featured_model("llama")
    patch(chunked, LongContextConfig(ring_degree=2))
    with pytest.raises(ValueError, match=r"handle.token_log_probs\(batch\).*loss='logits'"):
        chunked(**batch)
    with pytest.raises(ValueError, match="fused_lm_head=True with a sharded batch: attention"):
        chunked(**BATCHES["right"].given, fused_lm_head=True)  # without TRL's head


def check_everything(rank: int) -> None:
    check_fused(rank)
    check_sums(rank)
    check_rows_and_tokens(rank)
    check_rows_without_labels(rank)
    check_fused_evaluation(rank)
    check_logits(rank)
    check_refusals(rank)


def test_over_two_ranks() -> None:
    run_distributed(check_everything, 2)
