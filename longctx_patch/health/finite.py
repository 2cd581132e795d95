"""Skips the optimizer's step when the loss or the gradient norm is not finite.

The losses of all ranks and the norm of the gradient are gathered on the device. Where one of them
is not finite, torch's fused Adam and AdamW leave weights, states and step counts as they were, as
they do for a gradient scaler (their attribute `found_inf`), so that the host need not know it to go
on. Other optimizers skip parameters without gradients: there the host reads the numbers first, for
which it waits on a GPU, and drops the gradients of a bad step. So does a gradient scaler's: it
skips overflown gradients by itself, so that losses alone are judged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class BadStepError(RuntimeError):
    """A step's loss or gradient norm was not finite, and no more steps may be skipped."""


@dataclass(kw_only=True)
class StepHistory:
    """Holds what is known of the steps so far, which a checkpoint has to keep."""

    num_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Holds the numbers of a step, the same on every rank."""

    loss: float
    """The mean over all ranks."""
    grad_norm: float
    problem: str
    """Why the step was not applied, in words; empty if it was."""

    @property
    def is_applied(self) -> bool:
        return not self.problem


class OnTheWay:
    """Numbers of a device on their way to the host, which need not wait for them yet."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> Tensor:
        """Wait for them; a tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


class PendingStep:
    """The numbers of a step on their way to the host."""

    def __init__(self, by_rank: Tensor, *, judges_norm: bool) -> None:
        """`by_rank`: `[ranks, 2]` losses and gradient norms, float64."""
        self.device = by_rank.device
        judged = by_rank if judges_norm else by_rank[:, 0]
        is_bad = torch.isfinite(judged).all().logical_not()
        self.is_bad = is_bad.float()
        """1 or 0 on the device, a scalar. The host reads this decision, and makes none of its
        own."""
        self._sent = OnTheWay(torch.cat([is_bad.double()[None], by_rank.flatten()]))
        self.is_on_host = self.device.type == "cpu"
        """Whether `numbers` need not wait; the same on every rank."""

    def numbers(self) -> StepNumbers:
        """Wait for the numbers. The same on every rank."""
        host = self._sent.numbers()
        self.is_on_host = True
        by_rank = host[1:].view(-1, 2)
        loss, norm = by_rank[:, 0].mean().item(), by_rank[0, 1].item()
        problem = _problem(by_rank.tolist()) if host[0].item() else ""
        return StepNumbers(loss=loss, grad_norm=norm, problem=problem)


def _problem(by_rank: list[list[float]]) -> str:
    odd = {rank: loss for rank, (loss, _) in enumerate(by_rank) if not math.isfinite(loss)}
    if odd:
        values = " and ".join(sorted({str(value) for value in odd.values()}))
        return f"the loss is {values} on rank {', '.join(map(str, odd))}"
    norm = next((norm for _, norm in by_rank if not math.isfinite(norm)), math.inf)
    return f"the gradient norm is {norm}"


def gathered(mine: Tensor) -> Tensor:
    """`[ranks, *mine.shape]` of all processes, without a wait of the host. Collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return mine[None]
    # Not all_gather_into_tensor: torch 2.13 warns of it, and 2.11 lacks its new name.
    found = mine.new_empty(dist.get_world_size(), mine.numel())
    dist.all_gather(list(found), mine.flatten())
    return found.view(-1, *mine.shape)


class FiniteSteps:
    """Skips the optimizer's step when the loss or the gradient norm is not finite.

    Collective: every process has one, and calls it for each step, so that all of them decide alike.
    A good step's numbers are what they are without it, to the last bit.

    Args:
        optimizer: torch's, or Accelerate's around it.
        skip_bad_steps: how many bad steps may be left out, in all; the one after them is an error.
        history: of the run that goes on; `history` is to be saved with a checkpoint.

    Raises:
        ValueError: `skip_bad_steps` below 0.

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
        self, optimizer: Any, *, skip_bad_steps: int = 0, history: StepHistory | None = None
    ) -> None:
        check_guard_settings(skip_bad_steps)
        self._optimizer, self.skip_bad_steps = optimizer, skip_bad_steps
        self.history = history or StepHistory()
        torch_optimizer(optimizer).register_step_post_hook(_forget)

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
        has_scaler = getattr(self._optimizer, "scaler", None) is not None
        pending = PendingStep(gathered(mine), judges_norm=not has_scaler)
        optimizer = torch_optimizer(self._optimizer)
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
        numbers, history = pending.numbers(), self.history
        if numbers.is_applied:
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


def check_guard_settings(skip_bad_steps: int, sentinel_every: int = 0) -> None:
    """Raise ValueError for settings that can't be right."""
    if skip_bad_steps < 0:
        raise ValueError(
            f"skip_bad_steps={skip_bad_steps}: a number of steps, 0 or more. 0 ends the run at the "
            "first step whose loss or gradient is not finite."
        )
    if sentinel_every < 0:
        raise ValueError(
            f"sentinel_every={sentinel_every}: a number of steps between comparisons, or 0 for "
            "none."
        )


def skips_on_device(optimizer: Any, device: torch.device) -> bool:
    """Says whether an optimizer leaves everything as it was where its `found_inf` is 1.

    torch's fused SGD does not: with momentum its first step would keep buffers that nothing wrote.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    # Trainers make an empty group for weights without decay, which adapters have none of.
    groups = [group for group in optimizer.param_groups if group["params"]]
    return all(group["fused"] and group["params"][0].device == device for group in groups)


def torch_optimizer(optimizer: Any) -> Any:
    """torch's optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _forget(optimizer: Any, *_: Any) -> None:
    """A mark holds for one step."""
    optimizer.__dict__.pop("found_inf", None)
