"""Skips a trainer's step whose loss or gradient norm is not finite; nothing of it is saved.

Trainers log rarely, so each step is checked by itself (`longctx_patch.health`), at the moment when
its gradient's norm is known. On a GPU the host reads what was found a step later, for which it need
not wait; on the CPU at once. Whatever saves, evaluates or ends training waits for it first.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longctx_patch.health.finite import FiniteSteps, PendingStep, StepHistory, StepNumbers
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.health.where import Pass, source_of
from longctx_patch.memory.random_state import RandomState
from longctx_patch.trainer.log_entries import add_entry
from longctx_patch.trainer.watching import HealthCallback

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

SKIPPED = "skipped_step"
"""Key of an entry of the trainer's log: the number of a step that was left out."""
FIRST_TOKENS, MOST_ROWS = 8, 4
"""How much of a bad batch is shown."""
_COUNTED = ("_metrics", "_total_train_tokens", "_logs", "_step")
"""What TRL's trainers count in `compute_loss`."""


@contextmanager
def counts_kept(trainer: Any) -> Iterator[None]:
    """Leave what a trainer of TRL counts as it is, whatever losses it computes meanwhile."""
    before = {n: copy.deepcopy(vars(trainer)[n]) for n in _COUNTED if n in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(before)


@dataclass
class _Step:
    """A step that is being computed, or whose numbers are on their way."""

    number: int
    random: RandomState
    losses: list[Tensor] = field(default_factory=list)
    passes: list[Any] = field(default_factory=list)
    """Arguments of `compute_loss`."""
    pending: PendingStep | None = None


class FiniteStepsMixin(_Trainer):
    """The overrides that check every step."""

    _skip_bad_steps: int
    _health: HealthCallback
    _say: Callable[[str], None]
    _guard: FiniteSteps | None = None
    _step_now: _Step | None = None
    _step_before: _Step | None = None
    last_numbers: StepNumbers
    """Those of the last step that the host knows of."""
    _are_weights_checked = False
    """Whether those that are being saved were found to be finite."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's `train`. Raises BadStepError on all ranks, for a step that may not be
        skipped, and ValueError for weights that are not finite before the first one."""
        self._guard = self._step_now = self._step_before = None
        found = super().train(*args, **kwargs)
        self._settle_step()
        return found

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step_now is None:
            random = RandomState.now(self.accelerator.device)
            self._step_now = _Step(self.state.global_step + 1, random)
        loss = super().training_step(model, *args, **kwargs)
        self._step_now.losses.append(loss)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step_now is not None and model.training:
            self._step_now.passes.append((model, dict(inputs), args, kwargs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Called between a step's last backward and the optimizer's step, with the norm or without
        it."""
        norm = super()._get_grad_norm(*args, **kwargs)
        step, self._step_now = self._step_now, None
        if step is not None:
            self._settle_step()
            loss = sum(step.losses[1:], step.losses[0])
            step.pending = self._finite_steps().guard(loss, norm)
            self._step_before = step
            if step.pending.is_on_host:
                self._settle_step()
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_save or self.control.should_evaluate:
            self._settle_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        check_saved_weights(self.model, self.accelerator.device, self.state.global_step)
        self._health.require_alike(self.state.global_step)
        self._are_weights_checked = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._are_weights_checked = False

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """The trainer's `save_model`. Raises ValueError for weights that are not finite; under DDP
        one rank may call it alone, and has what all of them have."""
        self._settle_step()
        if not self._are_weights_checked:
            device, step = self.accelerator.device, self.state.global_step
            check_saved_weights(self.model, device, step, together=self.accelerator.is_fsdp2)
        super().save_model(*args, **kwargs)

    def _finite_steps(self) -> FiniteSteps:
        """Made when the trainer has its optimizer and, in a run that goes on, its log."""
        if self._guard is None:
            skipped = sum(SKIPPED in entry for entry in self.state.log_history)
            self._guard = FiniteSteps(
                self.optimizer,
                skip_bad_steps=self._skip_bad_steps,
                history=StepHistory(num_skipped=skipped),
            )
        return self._guard

    def _settle_step(self) -> None:
        """Wait for the numbers of the last step, and log it if it was left out. Collective if it
        was bad, which all ranks find alike."""
        step, self._step_before = self._step_before, None
        if step is None or step.pending is None:
            return
        explain = partial(self._explain_step, step)
        numbers = self._finite_steps().settle(step.pending, explain, step=step.number)
        self.last_numbers = numbers
        if not numbers.is_applied:
            said = {SKIPPED: step.number, "skipped": numbers.problem}
            self._say(f"step {step.number} is skipped: {numbers.problem}")
            add_entry(self, said, step.number)

    def _explain_step(self, step: _Step) -> str:
        passes = [Pass(partial(self._run_again, *g), _rows_of(g[1])) for g in step.passes]
        with counts_kept(self):
            return source_of(step.passes[0][0], passes, step.random)

    def _run_again(self, model: Any, inputs: Any, args: Any, kwargs: Any) -> None:
        with self._gradients_stay_local(model):
            with self.compute_loss_context_manager():
                loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
            self.accelerator.backward(loss)

    def _gradients_stay_local(self, model: Any) -> AbstractContextManager[Any]:
        """Under DDP, so that a gradient is that of this rank."""
        return nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.no_sync(model)


def _rows_of(batch: Mapping[str, Any]) -> str:
    """A batch's rows in words, by their first tokens: a sampler doesn't say their numbers."""
    name, masked = ("input_ids", "attention_mask")
    if "prompt_ids" in batch:  # of a trainer that generates
        name, masked = ("prompt_ids", "prompt_mask")
    ids, mask = batch.get(name), batch.get(masked)
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return ""
    real = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else ids == ids
    first = [row[kept][:FIRST_TOKENS].tolist() for row, kept in zip(ids, real, strict=True)]
    more = f" and {len(first) - MOST_ROWS} more" if len(first) > MOST_ROWS else ""
    return f"those that begin with {', '.join(map(str, first[:MOST_ROWS]))}{more}"
