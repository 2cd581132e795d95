"""Rows of a batch that begin alike are computed as one row with branches: losses, values of each
token and gradients are those of the same rows apart through stock transformers, and a token that
rows share goes through the decoder once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longctx_patch import LongContextConfig, PatchHandle
from longctx_patch.data.whole_rows import HeadScores
from longctx_patch.loss import token_log_probs as tiles
from tests.hf.features import VOCABULARY
from tests.hf.steps import Step, complaints, on_ranks, reduced, step_of_ranks
from tests.hf.tiny import featured_model, gradients
from tests.prefixes.batches import BATCHES, IGNORED, apart, fewest_tokens, tokens_of_tree
from tests.prefixes.cases import SOME, Grid
from tests.prefixes.ranks import WAYS, run_on_ranks, sharing
from tests.reference import relative_error
from tests.trl.test_row_outputs import FIELDS, compare, loss_of_sum, loss_of_tokens

TWO = sharing(ring_degree=2)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_apart(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grid.py` has every pair of circumstances."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 7 * 4 * VOCABULARY)  # several tiles
    grid = Grid()
    wrong = [x for case in SOME if case.way == way for x in grid.wrong(case)]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_shared_unless_asked_for() -> None:
    batch = BATCHES["group"]
    (off,) = run_on_ranks(featured_model("llama"), batch, LongContextConfig(share_prefixes="off"))
    (on,) = run_on_ranks(featured_model("llama"), batch, sharing())
    assert off.tokens == len(batch.rows) * max(map(len, batch.rows))
    assert fewest_tokens(batch) <= on.tokens == tokens_of_tree(batch) < off.tokens / 2


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_token_of_several_rows_counts_as_often_in_the_loss_of_a_router(family: str) -> None:
    for rows in ("tree", "beginnings"):
        given: Any = BATCHES[rows].given | {"output_router_logits": True}
        stock = featured_model(family)
        wanted = stock(**given, use_cache=False).loss
        wanted.backward()
        found = step_of_ranks(stock, TWO, given)
        assert not complaints(found, Step(wanted.detach(), gradients(stock)), (family, rows))


@pytest.mark.parametrize("kept", [9, [3, -2, 20, 3, 15]])
def test_logits_of_chosen_columns(kept: Any) -> None:
    """Some of the columns belong to a token that rows share."""
    batch, stock = BATCHES["tree"], featured_model("gemma2")
    columns = slice(-kept, None) if isinstance(kept, int) else torch.tensor(kept)
    kept = kept if isinstance(kept, int) else columns
    given = {k: x for k, x in batch.given.items() if k != "labels"} | {"logits_to_keep": kept}
    is_real = batch.given["attention_mask"][:, columns, None]

    def step(model: Any, logits: Tensor) -> tuple[Tensor, Step]:
        weights = torch.linspace(-1, 2, logits.numel()).view_as(logits)
        loss = (weights * logits * is_real).sum()
        loss.backward()
        return logits.detach() * is_real, Step(loss.detach(), gradients(model))

    def run(model: Any, handle: PatchHandle) -> tuple[Tensor, Step]:
        return step(model, model(**given).logits)

    found = on_ranks(stock, sharing(ring_degree=2, loss="logits"), run)
    logits, wanted = step(stock, apart(stock, batch)[1][:, columns])
    assert relative_error(found[0][0], logits) < 1e-5
    assert not complaints(reduced([each for _, each in found]), wanted, kept)


def weighs_tokens(outputs: Any) -> Tensor:
    """Other weights for each token, of all fields with gradients."""
    weights = torch.linspace(-1, 2, outputs.log_probs.numel()).view_as(outputs.log_probs)
    loss = (weights * outputs.log_probs).sum() + 0.3 * (weights * outputs.entropy).square().sum()
    return loss if outputs.get("aux_loss") is None else loss + 0.1 * outputs.aux_loss


def weighs_rows(outputs: Any) -> Tensor:
    gains = outputs.log_probs.sum(1)
    return -torch.nn.functional.logsigmoid(gains * torch.linspace(-0.1, 0.2, len(gains))).sum()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_the_fields_of_trls_head(family: str) -> None:
    some = ("pair", "tree", "beginnings", "other words")
    for rows in some if family == "llama" else some[1:2]:
        given: Any = BATCHES[rows].given
        given = given | ({"output_router_logits": True} if family == "mixtral" else {})
        model = featured_model(family)
        every = partial(compare, model, given, config=TWO)
        every(weighs_tokens, temperature=0.8, outputs=FIELDS)
        every(loss_of_sum, scores=HeadScores, outputs=FIELDS[:2])
        by_row = partial(HeadScores, True, with_mean_logits=True)
        every(weighs_rows, scores=by_row, outputs=("log_probs", "entropy", "mean_logits"))
        model.get_output_embeddings().requires_grad_(False)
        every(loss_of_tokens, scores=HeadScores, outputs=("log_probs", "entropy"))


def test_documents_of_packed_rows_that_begin_alike() -> None:
    """They lie in one row, and in two, in which they are no neighbours."""
    one, two, three, four = (torch.tensor(row) for row in BATCHES["two prompts"].rows)
    for rows in ([[one, two, three, four]], [[one, two], [four, three]]):
        ids, positions = (
            pad_sequence([torch.cat(row) for row in each], batch_first=True)
            for each in (rows, [[torch.arange(len(x)) for x in row] for row in rows])
        )
        given = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORED)}
        given["position_ids"] = positions
        compare(featured_model("mistral"), given, weighs_tokens, config=TWO, outputs=FIELDS)
        in_forward = partial(compare, scores=HeadScores, config=TWO, outputs=FIELDS[:2])
        in_forward(featured_model("mistral"), given, loss_of_sum)


def test_evaluation_and_plans_made_ahead() -> None:
    """Top-1 hits, losses of shared evaluation, and a training step whose plans exist already."""
    stock = featured_model("qwen3")
    with torch.no_grad():
        wanted = {name: apart(stock, BATCHES[name]) for name in ("tree", "group")}

    def run(model: Any, handle: PatchHandle) -> Step:
        handle.token_log_probs(BATCHES["nothing"].given)  # layers are known after a first step
        given = handle.plan_ahead([BATCHES[name].given for name in wanted])
        for batch, values in zip(given, wanted.values(), strict=True):
            check_evaluation(model.eval(), handle, batch, *values)
            model.train().zero_grad()
            loss = handle.token_log_probs(batch).sum()
            loss.backward()
        return Step(loss.detach(), gradients(model))

    found = reduced(on_ranks(stock, TWO, run))
    loss = apart(stock, BATCHES["group"])[0].sum()
    loss.backward()
    assert not complaints(found, Step(loss.detach(), gradients(stock)), "made ahead")


def check_evaluation(
    model: Any, handle: PatchHandle, given: Any, values: Tensor, logits: Tensor
) -> None:
    with torch.no_grad(), handle.sharing_evaluation():
        scores, loss = handle.label_scores(given), model(**given).loss
    wanted = given["labels"][:, 1:]
    has_label = wanted != IGNORED
    assert relative_error(scores["log_probs"], values) < 1e-5
    assert torch.equal(scores["is_top1"], has_label & (logits[:, :-1].argmax(-1) == wanted))
    assert relative_error(loss, -values.sum() / has_label.sum()) < 1e-5


def test_a_count_of_labels_and_micro_batches() -> None:
    """The number of labels is the caller's, as in steps that accumulate."""
    batches = [BATCHES[name] for name in ("tree", "whole text", "beginnings")]
    stock = featured_model("llama")

    def run(model: Any, handle: PatchHandle) -> Step:
        total = torch.zeros(())
        for batch in batches:
            loss = model(**batch.given, num_items_in_batch=torch.tensor(101)).loss
            loss.backward()
            total += loss.detach()
        return Step(total, gradients(model))

    found = reduced(on_ranks(stock, TWO, run))
    wanted = -torch.stack([apart(stock, batch)[0].sum() for batch in batches]).sum() / 101
    wanted.backward()
    assert not complaints(found, Step(wanted.detach(), gradients(stock)), "accumulated")
