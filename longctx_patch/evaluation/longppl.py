"""LongPPL: perplexity on the tokens whose prediction needs the long context (arXiv 2410.23771).

A token is a key token of a text where

* its log-probability after the whole text before it is above that after a short context alone by
  more than `ALPHA` (the paper's long-short difference, equation 3), and
* its log-probability after the whole text is above `BETA` (the long-context likelihood, 4).

LongPPL is `exp` of the mean loss of the key tokens (equation 5). The paper has one strong model
find the key tokens for all models that are compared; here the model that is evaluated finds its
own, unless another one is given. As in the paper's implementation, `STEP` tokens share the start of
their short context, which is `CONTEXT` tokens before the first of them, and the first `CONTEXT`
tokens of a text are never key tokens. Over several texts all their key tokens count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx_patch.evaluation.row_scorer import Batch, LabelScores, RowScorer, batch_of

ALPHA, BETA = 2.0, -2.0
CONTEXT, STEP = 4096, 1024
"""Tokens of the short context of the first token of a window, and tokens of a window."""


@dataclass(frozen=True, kw_only=True)
class LongPPL:
    """Perplexities over long texts."""

    longppl: float | None
    """What the key tokens have; None where there are none."""
    perplexity: float
    """What all tokens have."""
    key_tokens: int
    tokens: int
    """How many tokens have a loss."""


def short_log_probs(
    scorer: RowScorer,
    texts: Sequence[Tensor],
    *,
    context: int = CONTEXT,
    step: int = STEP,
) -> list[Tensor]:
    """`[L - context]` log-probabilities of each text's tokens but the first `context`, given
    `context` to `context + step - 1` tokens before them. Collective over the world.

    Args:
        texts: `[L]` ids each, longer than `context`.
    """
    batches: list[Batch] = []
    for text in texts:
        whole, rest = divmod(len(text) - context, step)
        windows = [text[n * step : n * step + context + step] for n in range(whole)]
        at_once = max(1, len(text) // (context + step))  # no more tokens than in the whole text
        for first in range(0, whole, at_once):
            batches.append(batch_of(windows[first : first + at_once], unlabelled=context))
        if rest:
            batches.append(batch_of([text[whole * step :]], unlabelled=context))

    def keep(_: int, scores: LabelScores) -> Tensor:
        return scores.log_probs[:, context - 1 :].flatten()

    windows = scorer.over(batches, keep)
    sizes = [len(text) - context for text in texts]
    return list(torch.cat(windows).split(sizes)) if windows else []


def long_ppl(
    losses_of: Sequence[Tensor], long_of: Sequence[Tensor], short_of: Sequence[Tensor]
) -> LongPPL:
    """LongPPL of texts.

    Args:
        losses_of: `[L - 1]` log-probabilities of each text by the evaluated model.
        long_of: the same by the model that finds the key tokens.
        short_of: `[L - context]` of that model (`short_log_probs`).
    """
    found = []
    for mine, long, short in zip(losses_of, long_of, short_of, strict=True):
        size = len(short)
        is_key = (long[-size:] - short > ALPHA) & (long[-size:] > BETA)
        found.append(mine[-size:][is_key])
    keys, everything = torch.cat(found).double(), torch.cat(list(losses_of)).double()
    return LongPPL(
        longppl=float((-keys.mean()).exp()) if len(keys) else None,
        perplexity=float((-everything.mean()).exp()),
        key_tokens=len(keys),
        tokens=len(everything),
    )
