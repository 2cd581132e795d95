"""The fields of a pass that tells of labels, token by token."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class TokenFields(ModelOutput):
    """What a model returns of tokens' labels: `[B, L]` of a shard, `[B, L - 1]` of whole rows, 0
    where there is no label; fields that are not wanted are None.

    Their names and meanings are those of TRL's `FusedCausalLMOutput`.
    """

    loss: Tensor | None = None
    """A scalar."""
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    """A scalar: the router's loss."""
