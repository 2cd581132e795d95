"""Rows that begin alike, computed once: what comes back is what the rows give apart, in float64."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.integrations.neftune import activate_neftune

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.hf.sharing import CannotShareError
from longctx_patch.sequence.masks import causal
from longctx_patch.verification.shrink import keep_float64
from tests.hf.steps import Step, complaints, on_ranks, reduced, step_of_ranks
from tests.hf.tiny import SUPPORTED, VOCABULARY, featured_model, gradients
from tests.reference import relative_error

BOUND = 1e-10
ALWAYS = LongContextConfig(share_prefixes="always")


def tokens(count: int, seed: int) -> list[int]:
    drawn = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    found: list[int] = drawn.tolist()
    return found


PROMPT, TURN = tokens(19, 0), tokens(5, 1)
ROWS = [
    PROMPT + tokens(4, 2),
    PROMPT + TURN + tokens(11, 3),
    PROMPT + TURN + tokens(2, 4),
    PROMPT + TURN + tokens(2, 4),
    tokens(9, 5),
    PROMPT,
]
LABELLED = [(19, 23), (17, 35), (24, 26), (25, 26), (4, 9), (3, 15)]
"""Columns with a label, of which one row may have some in what is the prompt of others."""


def batch_of(side: str) -> dict[str, Tensor]:
    ids, labels, real = torch.full((3, len(ROWS), 37), -100)
    ids.fill_(3), real.zero_()
    for number, (row, (start, stop)) in enumerate(zip(ROWS, LABELLED, strict=True)):
        first = 37 - len(row) if side == "left" else 0
        ids[number, first : first + len(row)] = torch.tensor(row)
        labels[number, first + start : first + stop] = torch.tensor(row[start:stop])
        real[number, first : first + len(row)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": real}


@cache
def model_of(family: str) -> Any:
    model = featured_model(family)
    keep_float64(model)
    return model


TREE = 18 + 5 + 5 + 1 + 11 + 2 + 2 + 9 + 1
"""Tokens of all rows, those that they share once."""
WEIGHTS = torch.rand(len(ROWS), 36, generator=torch.Generator().manual_seed(6)).double()


@cache
def apart(family: str, side: str, wanted: str) -> tuple[list[Tensor], Step]:
    """Log-probabilities of each row, and a step of their mean or of a weighted sum of them; each
    row by itself through the stock model."""
    model, batch = copy.deepcopy(model_of(family)), batch_of(side)
    found, losses = [], []
    for number, (row, (start, stop)) in enumerate(zip(ROWS, LABELLED, strict=True)):
        first = 37 - len(row) if side == "left" else 0
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        labels = batch["labels"][number, first + 1 : first + len(row)]
        loss = cross_entropy(logits, labels, reduction="none")
        assert int((labels >= 0).sum()) == stop - start
        weights = WEIGHTS[number, first : first + len(row) - 1] if wanted == "log_probs" else -1.0
        losses.append((-loss * weights).sum())
        found.append(-loss.detach())
    loss = torch.stack(losses).sum() / (1 if wanted == "log_probs" else 37)
    loss.backward()
    return found, Step(loss.detach(), gradients(model))


def log_probs_of_ranks(family: str, side: str, config: LongContextConfig) -> tuple[Tensor, Step]:
    batch = batch_of(side)

    def run(model: Any, handle: PatchHandle) -> tuple[Tensor, Step]:
        computed: list[int] = []
        model.get_input_embeddings().register_forward_hook(
            lambda *a: computed.append(a[2].shape[1])
        )
        found = handle.token_log_probs(batch)
        assert sum(computed) * config.sequence_degree < TREE + 4 * config.sequence_degree
        loss = (found * WEIGHTS).sum()
        loss.backward()
        return found.detach(), Step(loss.detach(), gradients(model))

    (found, *others), steps = zip(*on_ranks(model_of(family), config, run), strict=True)
    assert all(torch.equal(found, other) for other in others)
    return found, reduced(list(steps))


WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "right", {}),
    ("llama", "left", {"ring_degree": 2, "loss": "logits"}),
    ("gpt_oss", "left", {"ulysses_degree": 2}),
    ("gemma2", "right", {"ring_degree": 3, "layout": "contiguous", "checkpoint": "attention"}),
    (
        "mistral",
        "right",
        {"ulysses_degree": 2, "ring_degree": 2, "checkpoint": "full", "attention_kept": 1.0},
    ),
    ("llama", "right", {"ring_degree": 4, "checkpoint": "attention", "attention_kept": 0.4}),
    # States and convolutions go on from the parent's end, on another rank or the same one.
    ("qwen3_next", "left", {"ring_degree": 2, "layout": "contiguous", "checkpoint": "full"}),
    (
        "qwen3_5_text",
        "right",
        {"ring_degree": 4, "layout": "zigzag", "checkpoint": "attention", "attention_kept": 0.5},
    ),
    (
        "kimi_linear",
        "right",
        {"ulysses_degree": 2, "recurrent_exchange": "heads", "checkpoint": "attention"},
    ),
    ("bamba", "right", {"ulysses_degree": 2, "ring_degree": 2, "recurrent_exchange": "heads"}),
    ("lfm2", "left", {"ring_degree": 3, "layout": "contiguous", "checkpoint": "attention"}),
]


@pytest.mark.parametrize(
    ("family", "side", "way"), [way for way in WAYS if way[0] in SUPPORTED], ids=str
)
def test_losses_and_log_probabilities_are_those_of_rows_apart(
    family: str, side: str, way: dict[str, Any]
) -> None:
    config = replace(ALWAYS, **way)
    given: Any = batch_of(side) | {"num_items_in_batch": 37}
    wanted = apart(family, side, "loss")[1]
    found = step_of_ranks(model_of(family), config, given)
    assert not (wrong := complaints(found._replace(logits=None), wanted, "loss", BOUND)), wrong
    rows, wanted = apart(family, side, "log_probs")
    values, step = log_probs_of_ranks(family, side, config)
    for number, row in enumerate(rows):
        first = 37 - len(ROWS[number]) if side == "left" else 0
        assert relative_error(values[number, first : first + len(row)], row) < BOUND
    assert not (wrong := complaints(step, wanted, "log-probabilities", BOUND)), wrong


GROUP = {"input_ids": torch.tensor([PROMPT + tokens(2, n) for n in range(4)])}
GROUP["labels"] = GROUP["input_ids"]


@pytest.mark.parametrize("kept", [0, 3])
def test_logits_on_request(kept: int) -> None:
    stock, config = model_of("gemma2"), replace(ALWAYS, ring_degree=2, loss="logits")
    given = {"input_ids": GROUP["input_ids"], "logits_to_keep": kept}
    logits = on_ranks(stock, config, lambda model, _: model(**given).logits.detach())
    wanted = stock(**given, use_cache=False).logits
    assert all(relative_error(found, wanted) < BOUND for found in logits)


def test_a_shared_token_counts_in_the_routers_loss_once_a_row() -> None:
    stock, given = copy.deepcopy(model_of("mixtral")), dict[str, Any](GROUP)
    given["output_router_logits"] = True
    found = step_of_ranks(stock, replace(ALWAYS, ring_degree=2), given)
    wanted = stock(**given, use_cache=False).loss
    wanted.backward()
    assert not (wrong := complaints(found, Step(wanted.detach(), gradients(stock)), "", BOUND)), (
        wrong
    )


def test_rows_in_another_order_are_another_batch() -> None:
    """They become the same row."""

    def run(model: Any, handle: PatchHandle) -> None:
        order = [1, 0, 2, 3] if handle.group_rank else [0, 1, 2, 3]
        with pytest.raises(ValueError, match="must hold shards of the same batch"):
            model(**{name: rows[order] for name, rows in GROUP.items()})

    on_ranks(model_of("llama"), replace(ALWAYS, ring_degree=2), run)


def with_dropout() -> Any:
    return get_peft_model(featured_model("llama"), LoraConfig(lora_dropout=0.1)).train()


def with_noise() -> Any:
    model = featured_model("llama")
    activate_neftune(model, 5.0)
    return model


CANNOT: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: featured_model("llama"), {"mask": causal}, "patched with mask="),
    (lambda: featured_model("llama4_text"), {}, "chunks of 7 tokens attend by themselves"),
    (with_dropout, {}, r"lora_A|lora_dropout.default drops out with p=0.1.*lora_dropout=0"),
    (with_noise, {}, "neftune_noise_alpha=5.0 would draw once"),
]


@pytest.mark.parametrize(("make", "options", "says"), CANNOT, ids=[case[2] for case in CANNOT])
def test_what_cannot_be_shared_is_refused_or_computed_apart(
    make: Any, options: dict[str, Any], says: str
) -> None:
    handle = patch(model := make(), ALWAYS, **options)
    for ask in (lambda: model(**GROUP), lambda: handle.token_log_probs(GROUP)):
        with pytest.raises(CannotShareError, match=f"share_prefixes='always' .*({says}).* Use "):
            ask()
    handle.unpatch()
    patch(model := make(), replace(ALWAYS, share_prefixes="auto"), **options)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=f"Rows that begin alike are computed apart: .*({says})"):
        found = model(**GROUP).loss
    patch(model := make(), LongContextConfig(share_prefixes="off"), **options)
    torch.manual_seed(0)
    assert torch.equal(found, model(**GROUP).loss)


@pytest.mark.parametrize(
    ("how", "alike", "computed"),
    [("off", 19, 84), ("auto", 19, 30), ("auto", 2, 84), ("always", 2, 81), ("always", 1, 84)],
)
def test_auto_shares_where_it_saves_a_tenth(how: Any, alike: int, computed: int) -> None:
    rows = [PROMPT[:alike] + tokens(21 - alike, 10 + number) for number in range(4)]
    model, found = featured_model("llama"), []
    patch(model, LongContextConfig(share_prefixes=how))
    model.get_input_embeddings().register_forward_hook(
        lambda *a: found.append(a[2][..., 0].numel())
    )
    model(input_ids=torch.tensor(rows), labels=torch.tensor(rows))
    assert found == [computed]
