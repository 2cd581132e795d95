"""Rows of one prompt in the same micro-batches: `group_by_prompt` of GRPO's and RLOO's trainers.

TRL shuffles the rows that it has generated before it cuts them into micro-batches, so that answers
to one prompt seldom meet in a forward, where they could share it (`share_prefixes`). Here the
micro-batches of each optimizer step are cut anew, with rows of one prompt side by side. A step
keeps the rows that TRL's shuffle gave it, so it learns the same wherever a loss adds up over rows
and doesn't ask which of them share a micro-batch; where it asks, this is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longctx_patch.config import LongContextConfig
from longctx_patch.hf.sharing import dropout_of
from longctx_patch.rules.together import refuse_together
from longctx_patch.trainer.generation import generating_class

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

MicroBatch = Mapping[str, Any]
"""TRL keeps tensors and lists of its rows, tensors without dimensions, and None."""

_ADD_UP = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"})
"""Losses of GRPO that are sums over rows, each with a factor that no micro-batch changes."""


def grouping_problems(trainer: Any, config: LongContextConfig) -> Iterable[str]:
    """Says what keeps rows of one prompt from being brought together, in words."""
    if generating_class(trainer) is None:
        yield (
            f"group_by_prompt=True with {type(trainer).__name__}: only GRPOTrainer and RLOOTrainer "
            "shuffle rows of one prompt apart. Leave it out."
        )
        return
    args = trainer.args
    if config.share_prefixes == "off":
        yield (
            "group_by_prompt=True with share_prefixes='off': rows that are brought together would "
            "share nothing. Use LongContextConfig(share_prefixes='auto'), or leave it out."
        )
    few, many = sorted((args.steps_per_generation, args.gradient_accumulation_steps))
    if many % few:
        yield (
            f"group_by_prompt=True with steps_per_generation={args.steps_per_generation} and "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a step has rows of "
            "two generations. Use numbers of which one is a multiple of the other."
        )
    if noise := _noise(trainer):
        yield (
            f"group_by_prompt=True with {noise}: rows that draw noise share nothing, and would "
            "draw other noise in another order. Set it to 0, or leave group_by_prompt out."
        )
    for reason in _reasons(trainer):
        yield (
            f"group_by_prompt=True with {reason}: what is learned follows from which rows share a "
            "micro-batch. Leave one of them out."
        )


def _noise(trainer: Any) -> str | None:
    """Names what draws noise in training."""
    if alpha := getattr(trainer.args, "neftune_noise_alpha", None):
        return f"neftune_noise_alpha={alpha}"
    modules = trainer.model.named_modules()
    return next((f"dropout of {p} in {name}" for name, m in modules if (p := dropout_of(m))), None)


def _reasons(trainer: Any) -> Iterable[str]:
    """Says what makes a trainer's loss follow from who shares a micro-batch."""
    loss = getattr(trainer, "loss_type", "grpo")  # RLOO's is the mean over rows
    if loss not in _ADD_UP:
        yield f"loss_type={loss!r}"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        yield f"top_entropy_quantile={trainer.top_entropy_quantile}"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        yield "an entropy bonus"
    if getattr(trainer, "aux_loss_enabled", False):
        yield "a router's loss"


def regrouped(batches: Sequence[MicroBatch], per_step: int) -> list[MicroBatch]:
    """Returns the micro-batches with rows of one prompt side by side within each optimizer step.

    Args:
        batches: of one generation, in order, each with the same number of rows.
        per_step: how many in a row belong to one optimizer step.

    Raises ValueError for values that are not one for each row, as images' are.
    """
    steps = (batches[first : first + per_step] for first in range(0, len(batches), per_step))
    return [batch for step in steps for batch in _of_one_step(step)]


def _of_one_step(step: Sequence[MicroBatch]) -> list[MicroBatch]:
    prompts = [prompt for batch in step for prompt in _prompts(batch)]
    order = sorted(range(len(prompts)), key=prompts.__getitem__)  # those that begin alike as well
    size = len(prompts) // len(step)
    joined = {name: _joined(name, [batch[name] for batch in step], size) for name in step[0]}
    places = (order[first : first + size] for first in range(0, len(order), size))
    return [{name: _rows(value, rows) for name, value in joined.items()} for rows in places]


def _prompts(batch: MicroBatch) -> list[list[int]]:
    pairs = zip(batch["prompt_ids"], batch["prompt_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def _joined(name: str, values: Sequence[Any], size: int) -> Any:
    first = values[0]
    if not _has_rows(first):
        return first
    if any(len(value) != size for value in values):
        raise ValueError(
            f"group_by_prompt=True with {name} of {len(first)} values for {size} rows: rows with "
            "images are not brought together, and share nothing. Leave it out."
        )
    return torch.cat(tuple(values)) if isinstance(first, Tensor) else [*chain(*values)]


def _rows(value: Any, rows: Sequence[int]) -> Any:
    if not _has_rows(value):
        return value
    return value[list(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]


def _has_rows(value: Any) -> bool:
    """Says whether it has a value for each row; the others are one for all micro-batches."""
    return value.ndim > 0 if isinstance(value, Tensor) else value is not None


class PromptGroupsMixin(_Trainer):
    """The override for trainers that generate; of others it changes nothing."""

    _group_by_prompt: bool
    _step: int
    _buffered_inputs: list[MicroBatch] | None
    _grouped: list[MicroBatch] | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's `train`. Raises ValueError on all ranks where an earlier one was stopped
        within a step: TRL would go on with its micro-batches, and count steps from there."""
        refuse_together(self._stopped_within_a_step() if self._group_by_prompt else ())
        return super().train(*args, **kwargs)

    def _stopped_within_a_step(self) -> Iterable[str]:
        if within := self._step % self._per_step():
            yield (
                f"group_by_prompt=True in a trainer that was stopped after {within} of "
                f"{self._per_step()} micro-batches: steps would no longer have the rows that were "
                "brought together. Make a new trainer, and resume from a checkpoint."
            )

    def _per_step(self) -> int:
        """How many micro-batches of one generation belong to one optimizer step."""
        return min(self.args.steps_per_generation, self.args.gradient_accumulation_steps)

    def _prepare_inputs(self, inputs: Any) -> Any:
        found = super()._prepare_inputs(inputs)
        if not self._group_by_prompt or not self.model.training:
            return found
        batches = self._buffered_inputs or []
        if batches is not self._grouped:  # those of a new generation
            batches = self._buffered_inputs = self._grouped = regrouped(batches, self._per_step())
        return batches[self._step % len(batches)]
