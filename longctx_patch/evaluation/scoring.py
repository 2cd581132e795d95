"""Scores of samples, from the log-probabilities of their answers alone: nothing is generated.

**Forced.** Greedy decoding emits the expected answer exactly if each of its tokens is the most
likely one after the prompt and the tokens before it. From the first token that is not, it goes
another way, of which these log-probabilities say nothing. So a part of the answer counts only if
all tokens up to its end are the most likely ones: the score is the share of parts that greedy
decoding is certain to emit, and what it would score by RULER's rule is never less. Of an answer
with several spellings, each of which greedy decoding might take, the best one counts.

**Ranked.** Each of the expected and the wrong answers is scored by the mean log-probability of its
tokens, so that a long one is not worse for its length (GPT-3, arXiv 2005.14165, section 2.4). Of
all of them, as many are taken as there are expected ones, the best first; the score is the share of
the expected ones among those. In a tie a wrong answer comes first.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from longctx_patch.evaluation.row_scorer import LabelScores, RowScorer, batch_of
from longctx_patch.evaluation.tasks.sample import Sample

Parts = Sequence[Sequence[int]]
"""Token ids of an answer, a part after the other."""


def score_samples(scorer: RowScorer, samples: Sequence[Sample]) -> list[float]:
    """The score of each sample, from 0 to 1, in their order. Collective over the world.

    A ranked sample takes one forward pass for each answer, right or wrong, and a forced one for
    each spelling up to the first that greedy decoding emits.

    Args:
        samples: the same on every rank; see `sample_problems`.

    Example:
        >>> score_samples(RowScorer(handle), samples)  # doctest: +SKIP
    """
    found: list[list[float]] = [[] for _ in samples]
    while rows := [
        (number, parts)
        for number, sample in enumerate(samples)
        for parts in _next_answers(sample, found[number])
    ]:
        for (number, _), value in zip(rows, _scores_of(scorer, samples, rows), strict=True):
            found[number].append(value)
    return [
        max(values) if sample.scoring == "forced" else _share_ranked(values, len(sample.answers))
        for sample, values in zip(samples, found, strict=True)
    ]


def _next_answers(sample: Sample, found: Sequence[float]) -> Sequence[Parts]:
    """Returns what is scored now: spellings of a forced sample, until one of them is right."""
    answers = _answers_of(sample)
    if sample.scoring == "ranked":
        return [] if found else answers
    return [] if 1.0 in found else answers[len(found) : len(found) + 1]


def _scores_of(
    scorer: RowScorer, samples: Sequence[Sample], rows: Sequence[tuple[int, Parts]]
) -> list[float]:
    """The score of each row: a sample's number and the parts that follow its prompt."""
    batches = []
    for number, parts in rows:
        prompt = torch.as_tensor(samples[number].prompt)
        ids = torch.cat([prompt, torch.tensor([token for part in parts for token in part])])
        batches.append(batch_of([ids], unlabelled=len(prompt)))

    def keep(row: int, scores: LabelScores) -> float:
        number, parts = rows[row]
        first = len(samples[number].prompt) - 1
        if samples[number].scoring == "forced":
            return _share_emitted(parts, scores.is_top1[0, first:].tolist())
        return float(scores.log_probs[0, first:].double().mean())

    return scorer.over(batches, keep)


def sample_problems(samples: Iterable[Sample]) -> Iterable[str]:
    """Says why a sample can't be scored, in words."""
    for number, sample in enumerate(samples):
        name = f"sample {number} of {sample.task}"
        if not sample.prompt:
            yield f"{name} has no prompt: its answer's first token would follow nothing."
        if not all(parts and all(parts) for parts in _answers_of(sample)) or not sample.answers:
            yield f"{name} has no answer, or an empty one: give each a token or more."
        if sample.scoring == "ranked" and not sample.others:
            yield f"{name} is ranked without wrong answers, among which all models are right."
        if sample.num_tokens > sample.length:
            yield (
                f"{name}: its prompt and its answer are {sample.num_tokens} tokens, more than the "
                f"{sample.length} that were asked for. Shorten the prompt, or ask for this length."
            )


def _answers_of(sample: Sample) -> list[Parts]:
    """Returns what follows the prompt in each row of a sample, in parts."""
    if sample.scoring == "ranked":
        return [(answer,) for answer in (*sample.answers, *sample.others)]
    return [sample.answers, *sample.spellings]


def _share_emitted(parts: Parts, is_top1: Sequence[bool]) -> float:
    """`is_top1`: of each token of all parts."""
    right = is_top1.index(False) if False in is_top1 else len(is_top1)
    ends = accumulate(map(len, parts))
    return sum(end <= right for end in ends) / len(parts)


def _share_ranked(values: Sequence[float], num_expected: int) -> float:
    """`values`: of the expected answers, then of the wrong ones."""
    order = sorted(range(len(values)), key=lambda n: (-values[n], n < num_expected))
    return sum(number < num_expected for number in order[:num_expected]) / num_expected
