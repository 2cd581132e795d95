"""Whole rows into a patched model: every rank returns the loss of one process with stock attention,
and the mean over ranks of the gradients is that process's gradient."""

import copy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx_patch import LongContextConfig, PatchHandle, patch
from tests.harness import run_distributed
from tests.hf.row_batches import BATCHES, DOCUMENTS, LENGTHS, ONE_ROW
from tests.hf.steps import Step, collated, complaints, on_ranks, step_of_ranks
from tests.hf.tiny import SUPPORTED, featured_model, gradients, precise_model
from tests.reference import relative_error

TWO = LongContextConfig(ring_degree=2)
RIGHT, LEFT = BATCHES["right"].given, BATCHES["left"].given
NO_LABELS = {"input_ids": torch.ones(1, 20).long(), "labels": torch.full((1, 20), -100)}
FAMILIES = ("llama", "mistral")
COUNTS = (None, 37, torch.tensor(37.0))


@cache
def alone(family: str, num_items: Any = None) -> Step:
    """The documents one after another through the stock model."""
    model = featured_model(family)
    losses = []
    for ids, labels in DOCUMENTS:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        losses.append(cross_entropy(logits, labels[1:], reduction="sum"))
    count = sum(int((labels[1:] != -100).sum()) for _, labels in DOCUMENTS)
    loss = torch.stack(losses).sum() / (num_items or count)
    loss.backward()
    return Step(loss.detach(), gradients(model))


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"ring_degree": 2},
        {"ulysses_degree": 2, "loss": "logits"},
        {"ring_degree": 3, "layout": "contiguous", "checkpoint": "attention"},
    ],
    ids=str,
)
def test_every_rank_has_the_loss_of_one_process(way: dict[str, Any]) -> None:
    config, batches = LongContextConfig(**way), [*BATCHES.values(), ONE_ROW]
    for number, (batch, family) in enumerate(product(batches, FAMILIES)):
        count = COUNTS[number % 3]
        given = batch.given | {"num_items_in_batch": count}
        found = step_of_ranks(featured_model(family), config, given)
        wrong = complaints(found, alone(family, count), (number, family))
        assert not wrong, "\n".join(wrong)
    assert float(step_of_ranks(featured_model("llama"), config, NO_LABELS).loss) == 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_have_the_loss_of_one_process(family: str) -> None:
    """The router's loss is added whole, as stock transformers adds it."""
    for rows in (RIGHT, LEFT):
        given = rows | {"num_items_in_batch": 37, "output_router_logits": True}
        stock = featured_model(family)
        found = step_of_ranks(stock, LongContextConfig(ulysses_degree=2), given)
        wanted = stock(**given, use_cache=False).loss
        wanted.backward()
        assert not complaints(found, Step(wanted.detach(), gradients(stock)), family)


def test_ranks_that_share_evaluation_have_the_loss_of_one_process() -> None:
    """Else each runs alone."""
    stock = featured_model("llama").eval()

    def evaluate(model: Any, handle: PatchHandle) -> None:
        for given in (RIGHT, LEFT, ONE_ROW.given):
            given = given | {"use_cache": False}  # with a cache none finds documents
            wanted = stock(**given).loss
            handle.counters.reset()
            assert relative_error(model(**given).loss, wanted) < 1e-6
            assert handle.counters.messages == 0
            with handle.sharing_evaluation():
                assert relative_error(model(**given).loss, wanted) < 1e-6
                assert handle.counters.messages > 0
                words = model.generate(given["input_ids"][:1, :9], max_new_tokens=3)
            assert words.shape == (1, 12)

    with torch.inference_mode():
        on_ranks(stock, TWO, evaluate)


def check_never_mixed(rank: int) -> None:
    """One rank gives a shard and the other whole rows: both learn of it, and nobody waits."""
    model = featured_model("llama")
    handle = patch(model, TWO)
    batch = RIGHT if rank else collated(handle, [{"input_ids": d.tolist()} for d, _ in DOCUMENTS])
    with pytest.raises(
        ValueError, match=r"(?s)rank 0.*, a shard with labels\n.*, whole rows with lab"
    ):
        model(**batch)
    model.train(rank == 0)  # the other would go backward without the first
    with pytest.raises(ValueError, match="gradients in evaluation mode"):
        model(**RIGHT)
    model.eval()
    with torch.no_grad():  # in evaluation each rank runs the stock path, alone if need be
        if rank == 0:
            model(**RIGHT)


def check_refused(rank: int) -> None:
    """What one rank can't read, or what is a shard's, is refused on all ranks."""
    model, good = featured_model("llama"), RIGHT
    patch(model, TWO)
    hole = good["attention_mask"].clone()
    hole[0, 3] = 0
    for change, says in (
        ({"attention_mask": hole}, "a hole between columns"),
        ({"num_items_in_batch": float("inf")}, "num_items_in_batch=inf: it counts tokens"),
        ({"num_items_in_batch": float("nan")}, "num_items_in_batch=nan"),
        ({"num_items_in_batch": -1}, "num_items_in_batch=-1: it counts tokens"),
        ({"num_items_in_batch": 0.5}, "num_items_in_batch=0.5: it counts tokens"),
        ({"num_items_in_batch": 0}, "num_items_in_batch=0 with labels"),
        ({"num_items_in_batch": torch.tensor(9.0).bfloat16()}, "rounds a count of tokens"),
        ({"labels": None}, "whole rows without labels in training"),
        ({"output_hidden_states": True}, "output_hidden_states=True with whole rows: outputs have"),
        ({"return_dict": False}, "return_dict=False with whole rows"),
        ({"input_ids": [[1, 2]]}, "input_ids: list"),
        ({"input_ids": good["input_ids"] + 60}, "the model's embedding has 97 rows"),
        ({"labels": good["labels"].where(good["labels"] < 9, 99)}, "labels are from 0 to 96, or"),
        ({"num_items_in_batch": torch.ones(2)}, r"num_items_in_batch \[2\]: it is one number"),
        ({"token_type_ids": good["input_ids"]}, "token_type_ids=tensor"),
    ):
        with pytest.raises(ValueError, match=says):
            model(**good | (change if rank else {}))
    if rank:  # a callback may generate on one rank, whom the others don't wait for
        with pytest.raises(
            ValueError, match=r"(cache|past_key_values) in training: .*model.eval\(\)"
        ):
            model.generate(good["input_ids"][:1, :5], max_new_tokens=2)
    for other in ({"num_items_in_batch": 37 + rank / 2}, {"input_ids": good["input_ids"] ^ rank}):
        with pytest.raises(ValueError, match="must hold shards of the same batch"):
            model(**good | other)
    model(good["input_ids"], attention_mask=good["attention_mask"], labels=good["labels"])


def check_two_ranks(rank: int) -> None:
    check_never_mixed(rank)
    check_refused(rank)


def test_what_ranks_refuse_together() -> None:
    run_distributed(check_two_ranks, 2)


def test_one_rank_takes_the_stock_path() -> None:
    """And refuses what transformers' own path would end on a GPU in an assertion of a kernel."""
    for stays in ({"labels": None}, {"output_hidden_states": True}):
        stock, model = featured_model("llama"), featured_model("llama")
        patch(model, LongContextConfig())
        assert torch.equal(model(**LEFT | stays).logits, stock(**LEFT | stays).logits)
    with pytest.raises(ValueError, match="the model's embedding has 97 rows"):
        model(**RIGHT | {"input_ids": RIGHT["input_ids"] + 60})


@pytest.mark.parametrize("training", [True, False])
def test_lengths_that_the_stock_path_does_not_read(training: bool) -> None:
    """One process took rows whose documents only `seq_lengths` says, and let them see each other:
    two refused them. So did evaluation, on any number of ranks."""
    model, given = featured_model("llama").train(training), ONE_ROW.given
    patch(model, LongContextConfig())
    with pytest.raises(ValueError, match=r"seq_lengths without position_ids: .*Give position_ids"):
        model(**given | {"position_ids": None}, seq_lengths=[list(LENGTHS)])
    model(**given, seq_lengths=[list(LENGTHS)])
    total = sum(LENGTHS)
    for other in ([total], [total - 1, 1]):
        with pytest.raises(ValueError, match="and position_ids say different documents"):
            model(**given, seq_lengths=[other])


REFUSED_ON_THE_LEFT = {
    "ministral3": ({}, "on the positions themselves"),
    "hunyuan_v1_dense": ({}, "on the positions themselves"),
    "hunyuan_v1_moe": ({}, "on the positions themselves"),
    "lfm2": ({"conv_bias": True}, r"Lfm2ShortConv.in_proj.bias: .*Pad on the right"),
    "bamba": ({"mamba_proj_bias": True}, r"BambaMixer.in_proj.bias: .*Pad on the right"),
}


BIASED = {
    "lfm2_moe": "conv_bias",
    "lfm3": "conv_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "falcon_h1": "mamba_proj_bias",
    "nemotron_h": "use_bias",
    "zamba2": "add_bias_linear",
}
"""Further families with such convolutions: what gives their projection a bias."""


@pytest.mark.parametrize("family", [name for name in BIASED if name in SUPPORTED])
def test_a_bias_before_a_convolution_is_refused_with_padding_on_the_left(family: str) -> None:
    model = precise_model(family, **{BIASED[family]: True})
    with pytest.raises(RuntimeError, match=r"in_proj.bias: .*Pad on the right"):
        step_of_ranks(model, TWO, dict(LEFT))


@pytest.mark.parametrize("family", [name for name in REFUSED_ON_THE_LEFT if name in SUPPORTED])
def test_what_padding_on_the_left_changes_is_refused_or_as_in_transformers(family: str) -> None:
    """Attention that depends on a token's own position: Hunyuan learns a norm after RoPE; and
    convolutions in front of which padding leaves the bias of a projection. Losses were off by up to
    1e-2. One rank takes the stock path."""
    options, says = REFUSED_ON_THE_LEFT[family]
    model, given = precise_model(family, **options), dict(LEFT)
    stock = copy.deepcopy(model)
    wanted = stock(**given, use_cache=False).loss
    with pytest.raises(RuntimeError, match=says):  # of the virtual rank that was refused
        step_of_ranks(model, TWO, given)
    assert torch.equal(step_of_ranks(model, LongContextConfig(), given).loss, wanted.detach())
    if "position" in says:
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    else:
        given = RIGHT | {"use_cache": False}
    wanted = stock(**given).loss
    wanted.backward()
    found = step_of_ranks(model, TWO, given)
    assert not complaints(found, Step(wanted.detach(), gradients(stock)), family)
