"""The loss law, in one place.

With `N` valid tokens in the whole step (all data-parallel replicas, all shards of a sequence, all
accumulation steps) and gradients averaged over `W` ranks, each rank's loss is

    W / N * (sum of the losses of its own tokens)

so that the mean over ranks is the loss one process would have, and so is the averaged gradient.
A rank without a valid token contributes an exact zero, and so does a step without any.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that has no loss, as in transformers and torch."""


def sequence_parallel_loss(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    num_valid_tokens: int | Tensor,
    num_averaged_ranks: int,
) -> Tensor:
    """This rank's cross-entropy by the loss law: a scalar, float32 (float64 for float64 logits).

    Args:
        logits: `[B, L, V]` of this rank's tokens, any float dtype.
        shift_labels: `[B, L]` int64, already shifted over the whole sequence: the label of a
            position is the token after it. `IGNORE_INDEX` marks tokens without loss.
        num_valid_tokens: N, the same on every rank.
        num_averaged_ranks: W, over which DDP or FSDP averages gradients.
    """
    token_sum = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
        shift_labels.to(logits.device).flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return share_of_loss(
        token_sum, num_valid_tokens=num_valid_tokens, num_averaged_ranks=num_averaged_ranks
    )


def share_of_loss(
    token_sum: Tensor, *, num_valid_tokens: int | Tensor, num_averaged_ranks: int
) -> Tensor:
    """This rank's loss by the loss law, from the sum over its own tokens: a scalar of its dtype."""
    if isinstance(num_valid_tokens, Tensor):
        count = num_valid_tokens.to(token_sum.device).reshape(()).clamp(min=1)
        return token_sum / count * num_averaged_ranks
    return token_sum / max(num_valid_tokens, 1) * num_averaged_ranks


def averaged_ranks() -> int:
    """W: DDP and FSDP average over all processes, data-parallel replicas and shards alike."""
    return dist.get_world_size() if _is_distributed() else 1


def all_valid_tokens(shift_labels: Tensor) -> Tensor:
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
    `device` is where the count travels (default: the labels', with NCCL this process's GPU).
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
