"""The loss of a patched model: the loss law for shards, the stock loss for everything else."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from longctx_patch.data import SHARD_KEY
from longctx_patch.groups import SequenceGroup
from longctx_patch.loss import (
    IGNORE_INDEX,
    all_valid_tokens,
    averaged_ranks,
    sequence_parallel_loss,
)


class ShardLoss:
    """What transformers calls as `model.loss_function`.

    A mixture of experts adds `router_aux_loss_coef` times its router's loss afterwards. Over the
    batches of a step these add up to their mean by tokens, so each counts by its share of them.
    """

    def __init__(self, model: PreTrainedModel, group: SequenceGroup) -> None:
        self.has_router_loss = False
        """Whether the pass under way returns router logits."""
        self._model = model
        self._group = group
        self._stock = model.loss_function
        self._coefficient: float | None = getattr(model, "router_aux_loss_coef", None)

    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        if kwargs.pop(SHARD_KEY, None) is not None:
            return self._of_shard(logits, labels, **kwargs)
        self._count_router_loss(1.0)
        loss: Tensor = self._stock(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return loss

    def restore(self) -> None:
        self._count_router_loss(1.0)

    def _of_shard(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        shift_labels: Tensor | None = None,
        num_valid_tokens: int | Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss law; `num_valid_tokens` counts the whole step over all processes.

        In evaluation each sequence group counts for itself: the mean over its ranks is the loss of
        its batch, and replicas may have different numbers of batches. Options that would change a
        stock loss were refused with the decoder's inputs.
        """
        group_count = self._valid_tokens_of_group(labels, shift_labels)
        assert shift_labels is not None
        alone = not self._model.training
        if num_valid_tokens is None:
            num_valid_tokens = (
                group_count if alone else all_valid_tokens(shift_labels.to(logits.device))
            )
        ranks = self._group.num_ranks if alone else averaged_ranks()
        if self.has_router_loss:
            replicas = ranks / self._group.num_ranks
            self._count_router_loss(replicas * group_count / max(1, int(num_valid_tokens)))
        return sequence_parallel_loss(
            logits, shift_labels, num_valid_tokens=num_valid_tokens, num_averaged_ranks=ranks
        )

    def _valid_tokens_of_group(self, labels: Tensor, shift_labels: Tensor | None) -> int:
        """Collective over the group; raises on every rank if one has labels that can't be right."""
        problem = _label_problem(labels, shift_labels)
        mine = 0 if shift_labels is None else int((shift_labels != IGNORE_INDEX).sum())
        everyone = self._group.everyone.all_gather_numbers((mine, int(problem is not None)))
        wrong = [rank for rank, (_, is_wrong) in enumerate(everyone) if is_wrong]
        if wrong:
            raise ValueError(problem or f"rank {wrong[0]} of the group refused its labels.")
        return sum(count for count, _ in everyone)

    def _count_router_loss(self, share: float) -> None:
        if self._coefficient is not None:
            self._model.router_aux_loss_coef = self._coefficient * share


def _label_problem(labels: Tensor, shift_labels: Tensor | None) -> str | None:
    if shift_labels is None:
        return (
            "this batch is a shard but has no shift_labels: labels must be shifted over the whole "
            "sequence before it is cut. Pass the batch of SequenceShardCollator unchanged."
        )
    if labels.shape != shift_labels.shape or not bool((labels == shift_labels).all()):
        return (
            "labels differ from shift_labels: the loss reads shift_labels, so a change of labels "
            "alone would do nothing. Mask labels in the rows, before the collator shifts them."
        )
    return None
