"""Whole rows into a patched model: every rank returns the loss of one process with stock attention,
and the mean over ranks of the gradients is that process's gradient."""

import copy
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import LongContextConfig, patch
from longctx_patch.transport.meeting import SequenceParallelismError
from tests.harness import run_distributed
from tests.hf.on_ranks import step_of_ranks
from tests.hf.steps import Step, collated, complaints, over_ranks
from tests.hf.tiny import SUPPORTED, featured_model, gradients, precise_model
from tests.reference import relative_error

VOCABULARY = 64
LENGTHS = ((23, 9, 16), (11, 30))


class Batch(NamedTuple):
    """A batch as a trainer makes it, and the documents in it, which the reference runs alone."""

    given: dict[str, Any]
    documents: list[tuple[Tensor, Tensor]]
    """Ids and labels `[1, L]`."""


def document(length: int, number: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(length) * (7 + number) + number * number) % VOCABULARY
    labels = ids.clone()
    labels[::4] = -100
    labels[0] = -100  # nothing predicts it
    return ids[None], labels[None]


def padded(side: str) -> Batch:
    documents = [document(length, number) for number, length in enumerate(LENGTHS[0])]
    longest = max(LENGTHS[0])

    def fill(x: Tensor, value: int) -> Tensor:
        left = longest - x.shape[1] if side == "left" else 0
        return torch.nn.functional.pad(x, (left, longest - x.shape[1] - left), value=value)

    return Batch(
        {
            "input_ids": torch.cat([fill(ids, 3) for ids, _ in documents]),
            "labels": torch.cat([fill(labels, -100) for _, labels in documents]),
            "attention_mask": torch.cat([fill(torch.ones_like(ids), 0) for ids, _ in documents]),
        },
        documents,
    )


def packed(num_rows: int) -> Batch:
    packs = [
        [document(length, number) for number, length in enumerate(lengths)]
        for lengths in LENGTHS[:num_rows]
    ]
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS[:num_rows]]
    longest = max(map(len, positions))

    def rows(parts: list[Tensor], value: int) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(x, (0, longest - len(x)), value=value) for x in parts]
        )

    ids, labels = ([torch.cat([doc[kind][0] for doc in docs]) for docs in packs] for kind in (0, 1))
    given = {
        "input_ids": rows(ids, 3),
        "labels": rows(labels, -100),
        "position_ids": rows(positions, 0),
    }
    return Batch(given, [doc for docs in packs for doc in docs])


BATCHES = {
    "right": padded("right"),
    "left": padded("left"),
    "packed": packed(1),
    "packed rows": packed(2),
    "no labels": Batch(
        {"input_ids": torch.ones(1, 20).long(), "labels": torch.full((1, 20), -100)}, []
    ),
}


def alone(family: str, batch: Batch, num_items: float | None) -> Step:
    """The documents one after another through the stock model."""
    model = featured_model(family)
    total, count = torch.zeros(()), 0
    for ids, labels in batch.documents:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        count += int((labels[:, 1:] != -100).sum())
    loss = total / (num_items or count or 1)
    if loss.requires_grad:
        loss.backward()
    return Step(loss.detach(), gradients(model))


WAYS: dict[int, list[dict[str, Any]]] = {
    2: [{"ring_degree": 2}, {"ulysses_degree": 2, "loss": "logits"}],
    3: [{"ring_degree": 3, "layout": "contiguous", "checkpoint": "attention"}],
}
FAMILIES = ("llama", "mistral")
COUNTS = (None, 37, torch.tensor(37.0))


def run_rows(rank: int, ways: list[dict[str, Any]]) -> list[tuple[float, Step]]:
    """(this rank's loss, the step over all ranks) of each case."""
    found = []
    for way in ways:
        for number, (batch, family) in enumerate(
            (batch, family) for batch in BATCHES.values() for family in FAMILIES
        ):
            model = featured_model(family)
            patch(model, LongContextConfig(**way))
            count = COUNTS[number % 3]
            loss = model(**batch.given, num_items_in_batch=count).loss
            loss.backward()
            found.append((float(loss), over_ranks(loss, model)))
    return found


@pytest.mark.parametrize("num_ranks", WAYS)
def test_every_rank_has_the_loss_of_one_process(num_ranks: int) -> None:
    ways = WAYS[num_ranks]
    by_rank = run_distributed(run_rows, num_ranks, ways)
    cases = [
        (name, family, COUNTS[number % 3])
        for _ in ways
        for number, (name, family) in enumerate((b, f) for b in BATCHES for f in FAMILIES)
    ]
    for number, (name, family, count) in enumerate(cases):
        num_items = None if count is None else float(count)
        wanted = alone(family, BATCHES[name], num_items)
        values = [losses[number][0] for losses in by_rank]
        assert values == [values[0]] * num_ranks, (name, family)
        step = by_rank[0][number][1]
        if name == "no labels":
            assert float(step.loss) == 0
            continue
        found = complaints(step, wanted, (name, family, count))
        assert not found, "\n".join(found)


def check_logits(rank: int) -> None:
    """With `loss="logits"` they are whole rows too, and what others compute of them trains right.

    A right-padded batch of the stock model has the same logits on tokens, and on padding we have 0.
    """
    for name in ("right", "left"):
        given = BATCHES[name].given | {"labels": None}
        stock, model = featured_model("llama"), featured_model("llama")
        patch(model, LongContextConfig(ring_degree=2, loss="logits"))
        is_real = given["attention_mask"].bool()[..., None]
        wanted = stock(**given, use_cache=False).logits * is_real
        labels = BATCHES[name].given["labels"]
        found = model(**given | {"labels": labels}).logits
        assert relative_error(found.detach(), wanted.detach()) < 1e-5
        for logits in (wanted, found):
            (logits.softmax(-1)[..., 5] ** 2).sum().backward()
        step = over_ranks(torch.zeros(()), model)
        assert not complaints(step, Step(torch.zeros(()), gradients(stock)), name)


def test_logits_are_those_of_whole_rows() -> None:
    run_distributed(check_logits, 2)


def check_routers(rank: int) -> None:
    """The router's loss is added whole, as stock transformers adds it."""
    for name, family in product(("right", "left"), ("mixtral", "qwen3_moe")):
        given = BATCHES[name].given | {"num_items_in_batch": 37, "output_router_logits": True}
        stock, model = featured_model(family), featured_model(family)
        wanted = stock(**given, use_cache=False).loss
        wanted.backward()
        patch(model, LongContextConfig(ulysses_degree=2))
        loss = model(**given).loss
        loss.backward()
        assert relative_error(loss.detach(), wanted.detach()) < 1e-5
        step = over_ranks(loss, model)
        assert not complaints(step, Step(wanted.detach(), gradients(stock)), (name, family))


def test_experts_have_the_loss_of_one_process() -> None:
    run_distributed(check_routers, 2)


def check_replicas(rank: int) -> None:
    """Two replicas of two ranks under DDP, as transformers' Trainer scales their losses."""
    batches, count = [BATCHES["right"], BATCHES["packed"]], 41
    stock, model = featured_model("llama"), featured_model("llama")
    for batch in batches:
        for ids, labels in batch.documents:
            stock(input_ids=ids, labels=labels, num_items_in_batch=count).loss.backward()
    patch(model, LongContextConfig(ring_degree=2))
    replicated = DistributedDataParallel(model)
    loss = replicated(**batches[rank // 2].given, num_items_in_batch=count).loss
    (loss * (4 // 2)).backward()
    wanted = gradients(stock)
    for name, grad in gradients(model).items():
        assert relative_error(grad, wanted[name]) < 1e-5, name


def test_replicas_under_ddp_add_up() -> None:
    run_distributed(check_replicas, 4)


def check_evaluation(rank: int) -> None:
    """Ranks that share evaluation have the loss of one process; else each runs alone."""
    stock, model = featured_model("llama").eval(), featured_model("llama").eval()
    handle = patch(model, LongContextConfig(ring_degree=2))
    with torch.no_grad():
        for name in ("right", "left", "packed"):
            given = BATCHES[name].given | {"use_cache": False}  # with a cache none finds documents
            wanted = stock(**given).loss
            handle.counters.reset()
            assert relative_error(model(**given).loss, wanted) < 1e-6
            assert handle.counters.messages == 0
            with handle.sharing_evaluation():
                assert relative_error(model(**given).loss, wanted) < 1e-6
                assert handle.counters.messages > 0
                words = model.generate(given["input_ids"][:1, :9], max_new_tokens=3)
            assert words.shape == (1, 12)


def check_never_mixed(rank: int) -> None:
    """One rank gives a shard and the other whole rows: both learn of it, and nobody waits."""
    model = featured_model("llama")
    handle = patch(model, LongContextConfig(ring_degree=2))
    rows = [{"input_ids": ids[0].tolist()} for ids, _ in BATCHES["right"].documents]
    batch = BATCHES["right"].given if rank else collated(handle, rows)
    with pytest.raises(SequenceParallelismError, match=r"rank 0: LABELS, rank 1: ROWS"):
        model(**batch)
    model.train(rank == 0)  # the other would go backward without the first
    with pytest.raises(ValueError, match="gradients in evaluation mode"):
        model(**BATCHES["right"].given)
    model.eval()
    with torch.no_grad():  # in evaluation each rank runs the stock path, alone if need be
        if rank == 0:
            model(**BATCHES["right"].given)


def check_refused(rank: int) -> None:
    """What one rank can't read, or what is a shard's, is refused on all ranks."""
    model = featured_model("llama")
    patch(model, LongContextConfig(ring_degree=2))
    good = BATCHES["right"].given
    hole = good["attention_mask"].clone()
    hole[0, 3] = 0
    for change, says in (
        ({"attention_mask": hole}, "a hole between columns"),
        ({"num_items_in_batch": float("inf")}, "num_items_in_batch=inf: it counts tokens"),
        ({"num_items_in_batch": 0.5}, "num_items_in_batch=0.5: it counts tokens"),
        ({"num_items_in_batch": 0}, "num_items_in_batch=0 with labels"),
        ({"num_items_in_batch": torch.tensor(9.0).bfloat16()}, "rounds a count of tokens"),
        ({"labels": None}, "whole rows without labels in training"),
        ({"output_hidden_states": True}, "output_hidden_states=True with whole rows: outputs have"),
        ({"return_dict": False}, "return_dict=False with whole rows"),
        ({"input_ids": [[1, 2]]}, "input_ids: list"),
        ({"input_ids": good["input_ids"] + 60}, "the model's embedding has 97 rows"),
        (
            {"labels": good["labels"].where(good["labels"] < 9, 99)},
            "labels are from 0 to 96, or -100 for tokens without",
        ),
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
    other = {"num_items_in_batch": 37.2 + rank / 2}
    with pytest.raises(ValueError, match="must hold shards of the same batch"):
        model(**good, **other)
    with pytest.raises(ValueError, match="must hold shards of the same batch"):
        model(**good | {"input_ids": good["input_ids"] + rank})
    model(good["input_ids"], attention_mask=good["attention_mask"], labels=good["labels"])


CHECKS = (check_evaluation, check_never_mixed, check_refused)


@pytest.mark.parametrize("check", CHECKS)
def test_over_two_ranks(check: Any) -> None:
    run_distributed(check, 2)


def test_one_rank_reads_whole_rows_alike_or_takes_the_stock_path() -> None:
    for name, batch in BATCHES.items():
        model = featured_model("mistral")
        patch(model, LongContextConfig())
        out = model(**batch.given)
        out.loss.backward()
        assert out.logits is None
        wanted = alone("mistral", batch, None)
        if name != "no labels":
            assert not complaints(Step(out.loss.detach(), gradients(model)), wanted, name)
    given = BATCHES["left"].given
    for stays in ({"labels": None}, {"output_hidden_states": True}):
        stock, model = featured_model("llama"), featured_model("llama")
        patch(model, LongContextConfig())
        assert torch.equal(model(**given | stays).logits, stock(**given | stays).logits)


def test_one_rank_does_not_look_up_what_is_not_there() -> None:
    """On a GPU transformers' own path would end in an assertion of a kernel."""
    model = featured_model("llama")
    patch(model, LongContextConfig())
    given = dict(BATCHES["right"].given)
    given["input_ids"] = given["input_ids"] + 60
    with pytest.raises(ValueError, match="the model's embedding has 97 rows"):
        model(**given)


@pytest.mark.parametrize("training", [True, False])
def test_lengths_that_the_stock_path_does_not_read(training: bool) -> None:
    """One process took rows whose documents only `seq_lengths` says, and let them see each other:
    two refused them. So did evaluation, on any number of ranks."""
    model = featured_model("llama").train(training)
    patch(model, LongContextConfig())
    given = {name: BATCHES["packed"].given[name] for name in ("input_ids", "labels")}
    with pytest.raises(ValueError, match=r"seq_lengths without position_ids: .*Give position_ids"):
        model(**given, seq_lengths=[list(LENGTHS[0])])
    model(**BATCHES["packed"].given, seq_lengths=[list(LENGTHS[0])])
    total = sum(LENGTHS[0])
    for other in ([total], [total - 1, 1]):
        with pytest.raises(
            ValueError, match="seq_lengths and position_ids say different documents"
        ):
            model(**BATCHES["packed"].given, seq_lengths=[other])


REFUSED_ON_THE_LEFT = {
    "ministral3": ({}, "on the positions themselves"),
    "hunyuan_v1_dense": ({}, "on the positions themselves"),
    "hunyuan_v1_moe": ({}, "on the positions themselves"),
    "lfm2": ({"conv_bias": True}, r"Lfm2ShortConv.in_proj.bias: .*Pad on the right"),
    "bamba": ({"mamba_proj_bias": True}, r"BambaMixer.in_proj.bias: .*Pad on the right"),
}


@pytest.mark.parametrize("family", [name for name in REFUSED_ON_THE_LEFT if name in SUPPORTED])
def test_what_padding_on_the_left_changes_is_refused_or_as_in_transformers(family: str) -> None:
    """Attention that depends on a token's own position: Hunyuan learns a norm after RoPE; and
    convolutions in front of which padding leaves the bias of a projection. Losses were off by up to
    1e-2. One rank takes the stock path."""
    options, says = REFUSED_ON_THE_LEFT[family]
    model, given = precise_model(family, **options), dict(BATCHES["left"].given)
    stock = copy.deepcopy(model)
    wanted = stock(**given, use_cache=False).loss
    with pytest.raises(RuntimeError, match=says):  # of the virtual rank that was refused
        step_of_ranks(model, LongContextConfig(ring_degree=2), given)
    alone = step_of_ranks(model, LongContextConfig(), given)
    assert torch.equal(alone.loss, wanted.detach())
    if "position" in says:
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        wanted = stock(**given).loss
    else:
        given = BATCHES["right"].given
        wanted = stock(**given, use_cache=False).loss
    wanted.backward()
    found = step_of_ranks(model, LongContextConfig(ring_degree=2), given)
    assert not complaints(found, Step(wanted.detach(), gradients(stock)), family)
