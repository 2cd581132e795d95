"""Scores of samples, from the log-probabilities of their answers alone: nothing is generated.

**Forced.** Greedy decoding emits the expected answer exactly if each of its tokens is the most
likely one after the prompt and the tokens before it. From the first token that is not, it goes
another way, of which these log-probabilities say nothing. So a part of the answer counts only if
all tokens up to its end are the most likely ones: the score is the share of parts that greedy
decoding is certain to emit, and what it would score by RULER's rule is never less.

**Ranked.** Each of the expected and the wrong answers is scored by the mean log-probability of its
tokens, so that a long one is not worse for its length (GPT-3, arXiv 2005.14165, section 2.4). Of
all of them, as many are taken as there are expected ones, the best first; the score is the share of
the expected ones among those. In a tie a wrong answer comes first.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from longctx_patch.evaluation.rows import Batch, LabelScores, RowScorer, batch_of
from longctx_patch.evaluation.tasks.sample import Sample

Tokens = Sequence[int]


def score_samples(scorer: RowScorer, samples: Sequence[Sample]) -> list[float]:
    """The score of each sample, from 0 to 1, in their order. Collective over the world.

    Each forced sample takes one forward pass, and each ranked one as many as it has answers, wrong
    ones included.

    Args:
        samples: the same on every rank; see `sample_problems`.

    Example:
        >>> score_samples(RowScorer(handle), samples)  # doctest: +SKIP
    """
    owners: list[int] = []
    batches: list[Batch] = []
    for number, sample in enumerate(samples):
        for answer in _whole_answers(sample):
            owners.append(number)
            ids = torch.tensor([*sample.prompt, *answer])
            batches.append(batch_of([ids], unlabelled=len(sample.prompt)))

    def keep(number: int, scores: LabelScores) -> float:
        sample = samples[owners[number]]
        first = len(sample.prompt) - 1
        if sample.scoring == "forced":
            return _share_emitted(sample.answers, scores.is_top1[0, first:].tolist())
        return float(scores.log_probs[0, first:].double().mean())

    found: list[list[float]] = [[] for _ in samples]
    for number, value in zip(owners, scorer.over(batches, keep), strict=True):
        found[number].append(value)
    return [
        values[0] if sample.scoring == "forced" else _share_ranked(values, len(sample.answers))
        for sample, values in zip(samples, found, strict=True)
    ]


def sample_problems(samples: Iterable[Sample]) -> Iterable[str]:
    """Why a sample can't be scored, in words."""
    for number, sample in enumerate(samples):
        name = f"sample {number} of {sample.task}"
        if not sample.prompt:
            yield f"{name} has no prompt: its answer's first token would follow nothing."
        if not sample.answers or not all((*sample.answers, *sample.others)):
            yield f"{name} has no answer, or an empty one: give each a token or more."
        if sample.scoring == "ranked" and not sample.others:
            yield f"{name} is ranked without wrong answers, among which all models are right."
        if sample.num_tokens > sample.length:
            yield (
                f"{name}: its prompt and its answer are {sample.num_tokens} tokens, more than the "
                f"{sample.length} that were asked for. Shorten the prompt, or ask for this length."
            )


def _whole_answers(sample: Sample) -> list[Tokens]:
    """What follows the prompt in each row of a sample."""
    if sample.scoring == "ranked":
        return [*sample.answers, *sample.others]
    return [[token for part in sample.answers for token in part]]


def _share_emitted(parts: Sequence[Tokens], is_top1: Sequence[bool]) -> float:
    """`is_top1`: of each token of all parts."""
    right = is_top1.index(False) if False in is_top1 else len(is_top1)
    ends = accumulate(map(len, parts))
    return sum(end <= right for end in ends) / len(parts)


def _share_ranked(values: Sequence[float], num_expected: int) -> float:
    """`values`: of the expected answers, then of the wrong ones."""
    order = sorted(range(len(values)), key=lambda n: (-values[n], n < num_expected))
    return sum(number < num_expected for number in order[:num_expected]) / num_expected
