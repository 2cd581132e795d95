"""The loss law: the one place where a loss is scaled.

With `N` valid tokens in the whole step (all data-parallel replicas, all shards of a sequence, all
accumulation steps) and gradients averaged over `W` ranks, each rank's loss is

    W / N * (sum of the losses of its own tokens)

so that the mean over ranks is the loss that one process would have, and the averaged gradient is
its gradient. A rank without a valid token contributes an exact zero, and so does a step without
any.

A trainer that scales losses by itself gets one value on all `P` ranks of a sequence group, which
are one replica to it: with the `N` that it divides by, `P / N * (sum over a rank's own tokens)`
goes backward on each rank, and its mean over the group is what all of them return (`group_value`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.transport import Transport

IGNORE_INDEX = -100
"""Label of a token that has no loss, as in transformers and torch."""


@dataclass(frozen=True)
class Scale:
    """W / N of one forward pass."""

    num_valid_tokens: float | Tensor
    """N, the same on every rank."""
    num_averaged_ranks: int
    """W, over which DDP or FSDP averages gradients."""

    def loss(self, token_sum: Tensor) -> Tensor:
        """This rank's loss from the sum over its own tokens: a scalar of the sum's dtype."""
        count = self.num_valid_tokens
        if isinstance(count, Tensor):
            count = count.to(token_sum.device).reshape(()).clamp(min=1)
        else:
            count = count if math.isnan(count) else max(count, 1)
        return token_sum / count * self.num_averaged_ranks

    def router_share(self, *, group_labels: int, group_ranks: int) -> float:
        """The factor of a router's loss, which each rank computes over all tokens of its group.

        With it, these losses add up over a step's batches to their mean, weighted by valid tokens.
        """
        replicas = self.num_averaged_ranks / group_ranks
        return replicas * group_labels / max(1, int(self.num_valid_tokens))


def own_part(tensor: Tensor, num_ranks: int) -> Tensor:
    """Returns the tensor, which is finite, unchanged, with its gradient times `num_ranks`.

    It is this rank's part of what all ranks of a group compute one loss from. The other ranks have
    no gradient for this part, so the mean over ranks is the gradient of one process.
    """
    constant = tensor.detach()
    return constant + num_ranks * (tensor - constant)


def scale_of(
    shift_labels: Tensor,
    *,
    group_labels: int,
    group_ranks: int,
    num_valid_tokens: int | Tensor | None,
    training: bool,
) -> Scale:
    """The scale of a pass over a shard; collective in training without `num_valid_tokens`.

    In evaluation without `num_valid_tokens` each sequence group counts for itself: the mean over
    its ranks is the loss of its batch, and replicas may have different numbers of batches.

    Args:
        shift_labels: this rank's labels, on the device where the count is reduced.
        group_labels: valid tokens of the sequence group in this pass.
        group_ranks: how many ranks share the sequence.
        num_valid_tokens: valid tokens of the whole step over all processes, if the caller knows.
        training: the model's mode.
    """
    if num_valid_tokens is not None:
        return Scale(num_valid_tokens, _world_size())
    if training:
        return Scale(_all_valid_tokens(shift_labels), _world_size())
    return Scale(group_labels, group_ranks)


def replica_scale(
    num_items: float | None, *, group_labels: int, group_ranks: int, training: bool
) -> Scale:
    """The scale of a replica's loss, of which each rank of the group has its part.

    A batch without any label has no mean: in evaluation its loss is NaN, as one process's, and
    trainers leave it out of theirs.

    Args:
        num_items: what the sum of token losses is divided by, transformers' `num_items_in_batch`;
            None: the valid tokens of the replica's own batch.
        group_labels: these valid tokens.
        group_ranks: P.
        training: the model's mode.
    """
    count = group_labels if num_items is None else num_items
    return Scale(math.nan if not training and float(count) == 0 else count, group_ranks)


def group_value(part: Tensor, everyone: Transport) -> Tensor:
    """The mean of all ranks' parts; its gradient goes to this rank's part alone. Collective."""
    parts = torch.cat(everyone.all_gather(part.detach().view(1), [1] * everyone.num_ranks))
    return parts.mean() + (part - part.detach())


def sum_of_token_losses(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Sum of cross-entropies: a scalar, float32 (float64 for float64 logits).

    Args:
        logits: `[B, L, V]` of this rank's tokens, any float dtype.
        shift_labels: `[B, L]` int64, already shifted over the whole sequence: the label of a
            position is the token after it. `IGNORE_INDEX` marks tokens without loss.
    """
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
        shift_labels.to(logits.device).flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def _world_size() -> int:
    """W: DDP and FSDP average over all processes, data-parallel replicas and shards alike."""
    return dist.get_world_size() if _is_distributed() else 1


def _all_valid_tokens(shift_labels: Tensor) -> Tensor:
    """N of one forward: valid labels of all processes, int64 scalar on the labels' device."""
    count = (shift_labels != IGNORE_INDEX).sum()
    if _is_distributed():
        dist.all_reduce(count)
    return count


def count_valid_tokens(
    batches: Iterable[Mapping[str, Tensor]], device: torch.device | str | None = None
) -> int:
    """N of a step with several micro batches: their valid `shift_labels` over all processes.

    Collective: every process calls it once a step with its own batches from the collator.
    `device` is where the count is reduced (default: the labels', with NCCL this process's GPU).
    """
    batches = [batches] if isinstance(batches, Mapping) else list(batches)
    for batch in batches:
        if not isinstance(batch, Mapping) or "shift_labels" not in batch:
            raise ValueError(
                f"count_valid_tokens got a {type(batch).__name__} without shift_labels: it counts "
                "the batches that SequenceShardCollator returned, not rows. Collate first."
            )
    counts = [(batch["shift_labels"] != IGNORE_INDEX).sum() for batch in batches]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    if device is None and _is_distributed() and "nccl" in dist.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None:
        total = total.to(device)
    if _is_distributed():
        dist.all_reduce(total)
    return int(total.item())


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
