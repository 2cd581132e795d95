"""Scores of samples are those of the stock model's own logits, on any number of ranks."""

from dataclasses import replace

import pytest
import torch

from longctx_patch import LongContextConfig, patch
from longctx_patch.evaluation.row_scorer import RowScorer, batch_of
from longctx_patch.evaluation.scoring import sample_problems, score_samples
from longctx_patch.evaluation.tasks.sample import Sample
from tests.evaluation.stock import WAYS, document, on_virtual_ranks, stock_log_probs, stock_logs
from tests.hf.tiny import featured_model

MODEL = featured_model("llama").eval()


def greedy(prompt: list[int], length: int) -> list[int]:
    found = list(prompt)
    for _ in range(length):
        found.append(int(stock_logs(MODEL, [*found, 0])[-1].argmax()))
    return found[len(prompt) :]


def forced(number: int, wrong: int | None) -> Sample:
    """Parts of 2, 3 and 1 tokens, whose token `wrong` is not what greedy decoding emits."""
    prompt = document(31 + 7 * number, number)
    answer = greedy(prompt, 6)
    if wrong is not None:
        answer[wrong] = (answer[wrong] + 1) % 90
    parts = (tuple(answer[:2]), tuple(answer[2:5]), tuple(answer[5:]))
    return Sample(
        task="vt",
        length=64 + 7 * number,
        depth=None,
        prompt=tuple(prompt),
        answers=parts,
    )


def ranked(number: int) -> Sample:
    """Five answers of 1 to 3 tokens, two of which are expected."""
    answers = [tuple(document(1 + n % 3, 50 + 5 * number + n)) for n in range(5)]
    return Sample(
        task="cwe",
        length=80,
        depth=None,
        prompt=tuple(document(40, 90 + number)),
        answers=tuple(answers[:2]),
        others=tuple(answers[2:]),
        scoring="ranked",
    )


SPELT = replace(forced(0, 0), spellings=(((95, 95),), forced(0, None).answers))
SAMPLES = [
    *(forced(n, wrong) for n, wrong in enumerate((None, 0, 2, 5))),
    SPELT,
    *map(ranked, range(4)),
]


def expected(sample: Sample) -> float:
    """The same from greedy decoding, and from whole logits."""
    prompt = list(sample.prompt)
    if sample.scoring == "forced":
        emitted, scores = greedy(prompt, 6), []
        for parts in (sample.answers, *sample.spellings):
            wanted, place, hits = [token for part in parts for token in part], 0, 0
            for part in parts:
                place += len(part)
                hits += emitted[:place] == wanted[:place]
            scores.append(hits / len(parts))
        return max(scores)
    means = {
        answer: float(stock_log_probs(MODEL, [*prompt, *answer])[-len(answer) :].mean())
        for answer in (*sample.answers, *sample.others)
    }
    best = sorted(means, key=lambda answer: -means[answer])[: len(sample.answers)]
    return len(set(best) & set(sample.answers)) / len(sample.answers)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_scores_are_the_stock_models(way: dict[str, int]) -> None:
    wanted = [expected(sample) for sample in SAMPLES]
    assert wanted[:5] == [1, 0, 1 / 3, 2 / 3, 1]
    assert len(set(wanted[5:])) > 1
    found = on_virtual_ranks(MODEL, way, lambda handle: score_samples(RowScorer(handle), SAMPLES))
    assert found == [wanted] * len(found)


def test_a_spelling_that_is_right_is_the_last_one_scored() -> None:
    handle = patch(featured_model("llama"), LongContextConfig())
    right = replace(forced(0, None), spellings=SPELT.spellings)
    for sample, passes in ((right, 1), (SPELT, 3)):
        scorer = RowScorer(handle)
        assert score_samples(scorer, [sample]) == [1.0]
        ways = (sample.answers, *sample.spellings)[:passes]
        lengths = [len(sample.prompt) + sum(map(len, parts)) for parts in ways]
        assert scorer.tokens == sum(lengths)


def test_a_tie_does_not_count() -> None:
    sample = ranked(0)
    handle = patch(featured_model("llama"), LongContextConfig())
    doubled = replace(sample, others=(*sample.answers, *sample.answers))
    assert score_samples(RowScorer(handle), [doubled]) == [0.0]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt": ()}, "has no prompt"),
        ({"answers": ()}, "has no answer"),
        ({"answers": ((3, 4), ())}, "has no answer, or an empty one"),
        ({"scoring": "ranked"}, "ranked without wrong answers"),
        ({"length": 30}, "are 37 tokens, more than the 30 that were asked for"),
    ],
)
def test_what_cannot_be_scored(changed: dict, says: str) -> None:
    good = forced(0, None)
    assert list(sample_problems([good])) == []
    problem = next(iter(sample_problems([good, replace(good, **changed)])))
    assert problem.startswith("sample 1 of vt")
    assert says in problem


def test_modes_are_as_they_were_and_numbers_finite() -> None:
    model = featured_model("llama")
    model.model.layers[0].eval()
    handle = patch(model, LongContextConfig())
    modes = [module.training for module in model.modules()]
    scorer = RowScorer(handle)
    assert scorer.over([batch_of([document(9, 1)])] * 2, lambda n, _: n) == [0, 1]
    assert scorer.tokens == 18
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"of row 0 \(2 of 2 rows in all\) are not finite"):
        scorer.over([batch_of([document(9, 1)])] * 2, lambda n, _: n)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
