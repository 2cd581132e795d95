"""Scores of tokens' labels, from their logits."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Scores of N tokens, each `[N]`, and 0 (False) where a token has no label."""

    losses: Tensor
    """Minus the log-probability of the label, float32 or wider."""
    entropy: Tensor
    """The entropy of the distribution over words, in nats; `[0]` where it is not wanted."""
    is_top1: Tensor
    """True where no word is likelier than the label, nor as likely with a lower number; `[0]`
    where it is not wanted."""
    mean_logits: Tensor
    """The mean of logits over words, after scale and softcap; `[0]` where it is not wanted."""

    @classmethod
    def of_losses(cls, losses: Tensor) -> "Scores":
        """Makes scores of losses alone."""
        none = losses[:0].detach()
        return cls(losses, none, none.bool(), none)

    @classmethod
    def join(cls, chunks: "list[Scores]") -> "Scores":
        """Joins the scores of all chunks, of which there is one at least."""
        return cls(*(torch.cat(column) for column in zip(*chunks, strict=True)))
