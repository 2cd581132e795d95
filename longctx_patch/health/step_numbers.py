"""The loss of each rank and the gradient's norm: judged on the device, read by the host later."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What the numbers of a step were, the same on every rank."""

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
