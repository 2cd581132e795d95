"""A step whose numbers are no numbers changes no weight.

The losses of all ranks and the norm of the gradient are gathered on the device. Where one of them
is not finite, torch's fused Adam and AdamW leave weights, states and step counts as they were, as
they do for a gradient scaler (their attribute `found_inf`), so that the host need not know it to go
on. Other optimizers skip parameters without gradients: there the host reads the numbers first, for
which it waits on a GPU, and drops the gradients of a bad step. So does a gradient scaler's: it
skips overflown gradients by itself, so that losses alone are judged.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longctx_patch.health.step_numbers import PendingStep, StepNumbers, gathered

SPIKE_WINDOW = 32
"""A spike is compared with the median loss of so many steps before it."""
SPIKE_LEAST = 8
"""With fewer steps before it nothing is a spike."""


class BadStepError(RuntimeError):
    """A step's loss or gradient was no number, or a spike, and no more steps may be skipped."""


@dataclass(kw_only=True)
class StepHistory:
    """What is known of the steps so far, which a checkpoint has to keep."""

    num_skipped: int = 0
    losses: list[float] = field(default_factory=list)
    """Of the last applied steps, at most `SPIKE_WINDOW`."""

    def median(self) -> float:
        """Of the last losses; infinite as long as there are few, and where it is not above 0, so
        that no multiple of it says what is high."""
        if len(self.losses) < SPIKE_LEAST:
            return math.inf
        median = statistics.median(self.losses)
        return median if median > 0 else math.inf


class FiniteSteps:
    """Steps an optimizer only with numbers: a loss and a gradient norm that are finite.

    Collective: every process has one, and calls it for each step, so that all of them decide alike.
    A good step's numbers are what they are without it, to the last bit.

    Args:
        optimizer: torch's, or Accelerate's around it.
        skip_bad_steps: how many bad steps may be left out, in all; the one after them is an error.
        max_loss_spike: a finite loss above so many times the median of the last steps is bad too; 0
            for never.
        history: of the run that goes on; `history` is to be saved with a checkpoint.

    Raises:
        ValueError: `skip_bad_steps` below 0, or a `max_loss_spike` other than 0 that is not above
            1.

    Example:
        >>> steps = FiniteSteps(optimizer, skip_bad_steps=3)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     numbers = steps.step(loss, norm)
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        skip_bad_steps: int = 0,
        max_loss_spike: float = 0.0,
        history: StepHistory | None = None,
    ) -> None:
        check_guard_settings(skip_bad_steps, max_loss_spike)
        self._optimizer = optimizer
        self.skip_bad_steps, self._max_loss_spike = skip_bad_steps, max_loss_spike
        self.history = history or StepHistory()
        _torch_optimizer(optimizer).register_step_post_hook(_forget)

    def step(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        explain: Callable[[], str] | None = None,
        *,
        step: int | None = None,
    ) -> StepNumbers:
        """`guard`, the optimizer's step, and `settle`: it waits for the device."""
        pending = self.guard(loss, grad_norm)
        self._optimizer.step()
        return self.settle(pending, explain, step=step)

    def guard(self, loss: Tensor, grad_norm: Tensor) -> PendingStep:
        """Make the optimizer's next step change nothing if the numbers are bad. Collective.

        Waits for the device only if the optimizer is not a fused Adam or AdamW on it.

        Args:
            loss: a scalar, this rank's. Losses are weighed as their mean over ranks.
            grad_norm: a scalar or DTensor: the norm of the whole gradient, before clipping.
        """
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        mine = torch.stack([loss.detach().double(), norm.detach().to(loss.device).double()])
        limit = self._max_loss_spike * self.history.median() if self._max_loss_spike else math.inf
        has_scaler = getattr(self._optimizer, "scaler", None) is not None
        pending = PendingStep(gathered(mine), judges_norm=not has_scaler, limit=limit)
        optimizer = _torch_optimizer(self._optimizer)
        if not has_scaler and skips_on_device(optimizer, pending.device):
            optimizer.found_inf = pending.is_bad
        elif pending.numbers().problem:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        return pending

    def settle(
        self,
        pending: PendingStep,
        explain: Callable[[], str] | None = None,
        *,
        step: int | None = None,
    ) -> StepNumbers:
        """Wait for a step's numbers, and count it. Every process calls it for each step.

        Args:
            explain: says more of a bad step, such as which layer and rows; all ranks call it.
            step: its number, for the error.

        Raises:
            BadStepError: on all ranks, for a bad step where no more may be skipped.
        """
        numbers = pending.numbers()
        history = self.history
        if numbers.is_applied:
            history.losses = [*history.losses, numbers.loss][-SPIKE_WINDOW:]
            return numbers
        problem = f"{numbers.problem}{'; ' + explain() if explain else ''}"
        if history.num_skipped >= self.skip_bad_steps:
            before = f"{history.num_skipped} steps were skipped before it, and "
            raise BadStepError(
                f"{'' if step is None else f'step {step}: '}{problem}. "
                f"{before if history.num_skipped else ''}skip_bad_steps={self.skip_bad_steps}, so "
                "the run ends. The step was not applied and nothing of it is saved. Use a lower "
                "learning rate, look at the rows, or go on from the last checkpoint with a higher "
                "skip_bad_steps."
            )
        history.num_skipped += 1
        return replace(numbers, problem=problem)


def check_guard_settings(
    skip_bad_steps: int, max_loss_spike: float = 0.0, sentinel_every: int = 0
) -> None:
    """Raise ValueError for settings that can't be right."""
    if skip_bad_steps < 0:
        raise ValueError(
            f"skip_bad_steps={skip_bad_steps}: a number of steps, 0 or more. 0 ends the run at the "
            "first step whose loss or gradient is not finite."
        )
    if max_loss_spike and not 1 < max_loss_spike < math.inf:
        raise ValueError(
            f"max_loss_spike={max_loss_spike}: a factor above 1 of the median loss, such as 5, or "
            "0 for no such check."
        )
    if sentinel_every < 0:
        raise ValueError(
            f"sentinel_every={sentinel_every}: a number of steps between comparisons, or 0 for "
            "none."
        )


def skips_on_device(optimizer: Any, device: torch.device) -> bool:
    """Whether an optimizer leaves everything as it was where its `found_inf` is 1.

    torch's fused SGD does not: with momentum its first step would keep buffers that nothing wrote.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    # Trainers make an empty group for weights without decay, which adapters have none of.
    groups = [group for group in optimizer.param_groups if group["params"]]
    return all(group["fused"] and group["params"][0].device == device for group in groups)


def _torch_optimizer(optimizer: Any) -> Any:
    """torch's optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _forget(optimizer: Any, *_: Any) -> None:
    """A mark holds for one step."""
    optimizer.__dict__.pop("found_inf", None)
