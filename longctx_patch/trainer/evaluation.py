"""Evaluation counts each row once, although all ranks of a sequence group hold it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset

MOST_BYTES = 2**32
"""Logits of one batch above this size are refused, in bytes of float32."""


class GroupGather:
    """Gathers what ranks hold as if each sequence group were one process.

    transformers cuts what it gathers of an incomplete last batch to its first entries, so an entry
    of each rank, and not of each group, would count rows twice and others never.
    """

    def __init__(self, accelerator: Accelerator, degree: int) -> None:
        """Ranks `i * degree` to `(i + 1) * degree - 1` share sequences."""
        self._accelerator, self._degree = accelerator, degree
        self.rows_of_batch: int | None = None
        """How many rows the evaluated batch has: the last one of a dataset without a length is cut
        to them. With several groups it is filled up, which is refused (`evaluation_problems`)."""

    def once(self, data: Any, use_gather_object: bool = False) -> Any:
        """Each group's `data` once, without the rows that fill up a last batch. Collective.

        Args:
            data: tensors `[rows, ...]` in any nesting, the same on the ranks of a group. Else, or
                with `use_gather_object`: a list.
        """
        if use_gather_object or not _is_all_tensors(data):
            is_first = self._accelerator.process_index % self._degree == 0
            return self._cut(gather_object(data if is_first else []))
        everything = self._accelerator.gather(data)
        return recursively_apply(lambda x: self._cut(self._one_per_group(x)), everything)

    def repeated(self, data: Any, use_gather_object: bool = False) -> Any:
        """As `once`, and each entry as often as ranks share a sequence.

        TRL gathers one number of each rank, and divides sums over them by `tp_size`.
        """
        found = self.once(data, use_gather_object)
        if isinstance(found, list):
            return [entry for entry in found for _ in range(self._degree)]
        if self._degree == 1:  # of one process a number has no dimension
            return found
        return recursively_apply(lambda x: x.repeat_interleave(self._degree, dim=0), found)

    def _one_per_group(self, gathered: Tensor) -> Tensor:
        world = self._accelerator.num_processes
        if world == 1:
            return gathered
        by_rank = gathered.unflatten(0, (world, -1))
        return by_rank[:: self._degree].flatten(0, 1)

    def _cut(self, gathered: Any) -> Any:
        state = self._accelerator.gradient_state
        remainder = state.remainder
        if remainder == -1:  # of a dataset without a length
            remainder = self.rows_of_batch or 0
        if not state.end_of_dataloader or remainder < 1 or getattr(gathered, "ndim", 1) == 0:
            return gathered
        return gathered[:remainder]


@contextmanager
def prepared_for_evaluation_alone(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """A model that is prepared within the context is not prepared afterwards.

    transformers prepares one that is evaluated before it is trained, without DDP, and Accelerate
    marks it. Training would find the mark and leave DDP out: no gradient would be averaged.
    """
    if accelerator._models:
        yield
        return
    own = vars(model)
    before = {name: own[name] for name in _PREPARED if name in own}
    try:
        yield
    finally:
        accelerator._models.clear()
        for name in _PREPARED:
            own.pop(name, None)
        own.update(before)


_PREPARED = ("_is_accelerate_prepared", "_original_forward", "forward")
"""What Accelerate sets on a model: its mark, and a forward under autocast."""


def evaluation_problems(accelerator: Accelerator, dataset: Any, num_groups: int) -> Iterable[str]:
    """Says why a dataset can't be evaluated now, in words."""
    if accelerator.is_fsdp2 and not accelerator._models:
        yield (
            "an evaluation before training under FSDP2: Accelerate shards a model together with "
            "its optimizer, which training makes. Use eval_on_start=True, or leave FSDP2 out."
        )
    if num_groups > 1 and isinstance(dataset, IterableDataset):
        yield (
            f"{type(dataset).__name__} is read as a stream, and is to be evaluated by {num_groups} "
            "sequence groups: Accelerate fills up its last batch with rows that would count twice. "
            "Use a dataset with an index, such as datasets.Dataset, or one sequence group."
        )


def _is_all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def logits_problem(inputs: dict[str, Any], vocabulary: int, loss: str) -> str | None:
    """Says why logits of these rows can't be had, in words; None if they can.

    Args:
        inputs: a batch of whole rows.
        vocabulary: number of logits of a token.
        loss: `LongContextConfig.loss`.
    """
    if loss != "logits":
        return (
            f"loss={loss!r}: predict, compute_metrics and preprocess_logits_for_metrics need "
            "logits of whole rows, which this loss never makes. Use "
            'LongContextConfig(loss="logits"), or evaluate without them (compute_metrics=None, '
            "prediction_loss_only=True)."
        )
    ids = inputs.get("input_ids")
    num_bytes = 4 * vocabulary * (ids.numel() if isinstance(ids, Tensor) else 0)
    if num_bytes <= MOST_BYTES:
        return None
    assert isinstance(ids, Tensor)
    return (
        f"logits of {ids.shape[0]} rows of {ids.shape[1]} tokens are {num_bytes / 2**30:.1f} GiB: "
        f"at most {MOST_BYTES / 2**30:g} GiB of a batch are gathered, since every rank holds them. "
        "Use a smaller per_device_eval_batch_size or shorter rows for metrics, or evaluate without "
        "them (compute_metrics=None, prediction_loss_only=True)."
    )
