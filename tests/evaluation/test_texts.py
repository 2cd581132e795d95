"""Losses by position and LongPPL are those of the stock model's own logits, on any number of
ranks; packed documents count as each alone."""

import copy
import math
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import ContextEvaluation, LongContextConfig, PatchHandle, evaluate_context, patch
from longctx_patch.evaluation import context_evaluation, longppl
from longctx_patch.evaluation.longppl import LongPPL, long_ppl, short_log_probs
from longctx_patch.evaluation.positions import default_edges, edge_problem, loss_by_position
from longctx_patch.evaluation.row_scorer import Batch, RowScorer, batch_of
from tests.evaluation.stock import WAYS, document, on_virtual_ranks, stock_log_probs
from tests.hf.tiny import featured_model

MODEL = featured_model("llama").eval()
LENGTH, EDGES = 97, (0, 8, 32, 64, 97)
TEXTS = [torch.tensor(document(LENGTH, number)) for number in range(3)]


def packed(lengths: tuple[int, ...]) -> Batch:
    """Documents of their own, one after another in a row."""
    documents = [torch.tensor(document(n, 7 * n)) for n in lengths]
    labels = [torch.cat([torch.tensor([-100]), ids[1:]]) for ids in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }


def losses_by_hand(documents: list[Tensor]) -> tuple[list[float], list[int]]:
    sums, counts = [0.0] * 4, [0] * 4
    for ids in documents:
        for place, log in enumerate(stock_log_probs(MODEL, ids).tolist(), start=1):
            bucket = next(n for n in range(4) if EDGES[n] <= place < EDGES[n + 1])
            sums[bucket] -= log
            counts[bucket] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)], counts


@pytest.mark.parametrize("way", [WAYS["one rank"], WAYS["both"]])
def test_losses_by_position(way: dict[str, int]) -> None:
    lengths = (40, 97, 13)
    batches = [batch_of([text]) for text in TEXTS] + [packed(lengths)]
    documents = [*TEXTS, *(torch.tensor(document(n, 7 * n)) for n in lengths)]

    def run(handle: PatchHandle) -> tuple[list[float | None], list[int]]:
        logs = RowScorer(handle).over(batches, lambda _, scores: scores.log_probs)
        found = loss_by_position(batches, logs, EDGES)
        return list(found.loss), list(found.tokens)

    losses, counts = losses_by_hand(documents)
    for found, found_counts in on_virtual_ranks(MODEL, way, run):
        assert found_counts == counts
        assert found == pytest.approx(losses, rel=1e-5)


def test_errors_of_losses_by_position_are_those_of_the_texts() -> None:
    """Where texts are as long, it is the standard deviation of their means by the root of their
    number; where not, they count by their tokens."""
    batches = [batch_of(TEXTS[:2]), batch_of(TEXTS[2:])]
    logs = torch.rand(
        3, LENGTH - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = loss_by_position(batches, [logs[:2], logs[2:]], EDGES)
    assert found.texts == (3, 3, 3, 3)
    places = [(max(start, 1) - 1, stop - 1) for start, stop in pairwise(EDGES)]
    means = [[-float(row[a:b].mean()) for row in logs] for a, b in places]
    assert found.loss == pytest.approx([fmean(each) for each in means])
    wanted = [stdev(each) / math.sqrt(3) for each in means]
    assert found.standard_error == pytest.approx(wanted)
    short = [batch_of([TEXTS[0]]), batch_of([TEXTS[1][:20]])]
    found = loss_by_position(short, [logs[:1], logs[1:2, :19]], EDGES)
    assert found.texts == (2, 2, 1, 1)
    assert found.standard_error[2:] == (None, None)
    sums, counts = [-float(logs[0, 7:31].sum()), -float(logs[1, 7:19].sum())], [24, 12]
    off = [s - sum(sums) / 36 * c for s, c in zip(sums, counts, strict=True)]
    assert found.standard_error[1] == pytest.approx(math.sqrt(2 * sum(o * o for o in off)) / 36)


CONTEXT, STEP = 16, 6


def longppl_by_hand(texts: list[Tensor], alpha: float, beta: float, judge: Any = MODEL) -> LongPPL:
    """The paper's definition, a window of `STEP` tokens at a time, as its authors compute it; the
    judge finds the key tokens."""
    keys, everything = [], []
    for text in texts:
        mine, long = stock_log_probs(MODEL, text), stock_log_probs(judge, text)
        everything += mine.tolist()
        for start in range(0, len(text) - CONTEXT, STEP):
            window = text[start : start + CONTEXT + STEP]
            short = stock_log_probs(judge, window)[CONTEXT - 1 :]
            places = slice(start + CONTEXT - 1, start + CONTEXT - 1 + len(short))
            is_key = ((long[places] - short) > alpha) & (long[places] > beta)
            keys += mine[places][is_key].tolist()
    return LongPPL(
        longppl=math.exp(-sum(keys) / len(keys)) if keys else None,
        perplexity=math.exp(-sum(everything) / len(everything)),
        key_tokens=len(keys),
        tokens=len(everything),
    )


@pytest.mark.parametrize(
    ("way", "alpha", "beta"),
    [(WAYS["one rank"], 0.05, -5.0), (WAYS["both"], 0.05, -5.0), (WAYS["ring"], 2.0, -0.1)],
)
def test_longppl(
    way: dict[str, int], alpha: float, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longppl, "ALPHA", alpha)
    monkeypatch.setattr(longppl, "BETA", beta)
    wanted = longppl_by_hand(TEXTS, alpha, beta)
    assert (wanted.key_tokens > 5) == (alpha == 0.05)

    def run(handle: PatchHandle) -> LongPPL:
        scorer = RowScorer(handle)
        long = scorer.over([batch_of([t]) for t in TEXTS], lambda _, s: s.log_probs[0])
        short = short_log_probs(scorer, TEXTS, context=CONTEXT, step=STEP)
        return long_ppl(long, long, short)

    for found in on_virtual_ranks(MODEL, way, run):
        assert (found.key_tokens, found.tokens) == (wanted.key_tokens, wanted.tokens)
        assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
        assert found.longppl == (wanted.longppl and pytest.approx(wanted.longppl, rel=1e-5))


def test_another_model_finds_the_key_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longppl, "ALPHA", 0.05)
    monkeypatch.setattr(longppl, "BETA", -5.0)
    monkeypatch.setattr(context_evaluation, "CONTEXT", CONTEXT)
    short = partial(short_log_probs, context=CONTEXT, step=STEP)
    monkeypatch.setattr(context_evaluation, "short_log_probs", short)
    judge = featured_model("llama", num_hidden_layers=3)
    wanted = longppl_by_hand(TEXTS, 0.05, -5.0, judge)
    handle, other = (patch(copy.deepcopy(m), LongContextConfig()) for m in (MODEL, judge))
    asked = ContextEvaluation(
        lengths=(LENGTH,), texts=tuple(tuple(text.tolist()) for text in TEXTS), longppl=True
    )
    own = evaluate_context(handle, None, asked).longppl
    assert own is not None
    assert own.longppl == pytest.approx(longppl_by_hand(TEXTS, 0.05, -5.0).longppl, rel=1e-5)
    found = evaluate_context(handle, None, asked, key_handle=other).longppl
    assert found is not None
    assert (found.key_tokens, found.tokens) == (wanted.key_tokens, wanted.tokens)
    assert found.longppl == pytest.approx(wanted.longppl, rel=1e-5)
    assert own.key_tokens != found.key_tokens


def test_edges() -> None:
    assert default_edges(700) == (0, 87, 175, 350, 700)
    assert default_edges(4096) == (0, 512, 1024, 2048, 4096)
    assert default_edges(5000) == (0, 1024, 4096, 5000)
    assert default_edges(3) == (0, 1, 3)
    assert default_edges(65536) == (0, 1024, 4096, 8192, 16384, 32768, 65536)
    assert edge_problem((0, 5)) is None
    for wrong in ((), (3,), (0, 4, 4), (-1, 4)):
        assert str(wrong) in (edge_problem(wrong) or "")
