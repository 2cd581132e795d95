"""Whole rows over the ranks of a job: one sequence group computes each, and all ranks get what is
kept of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.handle import PatchHandle, evaluation_mode
from longctx_patch.hf.sentinel import computing_device
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.rules.together import num_ranks, of_all_ranks, own_rank

Batch = Mapping[str, Any]
"""Whole rows: `input_ids` and `labels` `[B, L]`, as `PatchHandle.label_scores` takes them."""
Kept = TypeVar("Kept")


class LabelScores(NamedTuple):
    """Holds scores of a batch's labels, `[B, L - 1]` on the CPU (`PatchHandle.label_scores`)."""

    log_probs: Tensor
    is_top1: Tensor


def batch_of(rows: Sequence[Sequence[int] | Tensor], *, unlabelled: int = 0) -> Batch:
    """Rows of one length, a document each, whose first `unlabelled` tokens have no label."""
    ids = torch.stack([torch.as_tensor(row, dtype=torch.int64) for row in rows])
    labels = ids.clone()
    labels[:, :unlabelled] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


class RowScorer:
    """Scores batches of whole rows, and counts their tokens.

    Args:
        handle: of the model.
        model: as for `PatchHandle.token_log_probs`.
        watchdog: is told of each batch.
    """

    def __init__(
        self,
        handle: PatchHandle,
        model: nn.Module | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.tokens = 0
        """How many tokens all batches have, each counted once for the job."""
        self._handle, self._model = handle, handle.model if model is None else model
        self._watchdog = watchdog

    def over(
        self, batches: Sequence[Batch], keep: Callable[[int, LabelScores], Kept]
    ) -> list[Kept]:
        """Returns what is kept of each batch, in their order, on every rank. Collective over the
        world.

        Batches go to the sequence groups in turn, the longest first. Every group makes as many
        forward passes, whatever their lengths, since FSDP2's ranks gather each layer's weights
        together: a group that has none left repeats the shortest batch. The model evaluates without
        gradients and is then in the mode that it was in.

        Args:
            batches: the same on every rank.
            keep: what is to be kept of a batch, by its number and its scores: something small
                that pickles.

        Raises:
            ValueError: on all ranks, for log-probabilities that are not finite.
        """
        sizes = [batch["input_ids"].numel() for batch in batches]
        self.tokens += sum(sizes)
        order = sorted(range(len(batches)), key=lambda n: -sizes[n])
        degree = self._handle.config.sequence_degree
        # Virtual ranks are threads of one process, and one group.
        num_groups, group = max(1, num_ranks() // degree), own_rank() // degree
        kept: dict[int, Kept] = {}
        bad: list[int] = []
        with evaluation_mode(self._model):
            for first in range(0, len(order), num_groups):
                place = first + group
                number = order[min(place, len(order) - 1)]
                scores = self._scores(batches[number])
                if place < len(order):
                    bad += [] if bool(scores.log_probs.isfinite().all()) else [number]
                    kept[number] = keep(number, scores)
        everyones = of_all_ranks((kept if self._handle.group_rank == 0 else {}, bad))
        if wrong := sorted({number for _, those in everyones for number in those}):
            raise ValueError(
                f"the model's log-probabilities of row {wrong[0]} ({len(wrong)} of {len(batches)} "
                "rows in all) are not finite, so there is nothing to score. Load it in bfloat16 or "
                "float32, and look for weights that are not finite."
            )
        everything = kept | {n: value for those, _ in everyones for n, value in those.items()}
        return [everything[number] for number in range(len(batches))]

    def _scores(self, batch: Batch) -> LabelScores:
        if self._watchdog is not None:
            self._watchdog.enter("evaluate")
        device = computing_device(next(self._model.parameters()).device)
        given = {name: value.to(device) for name, value in batch.items()}
        found = self._handle.label_scores(given, model=self._model)
        return LabelScores(found["log_probs"].cpu(), found["is_top1"].cpu())
