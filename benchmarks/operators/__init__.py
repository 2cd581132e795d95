"""Operators for attention over ranks, ours and others', which `attention_job.py` times.

A module here has `candidates(job)`. Importing it must need nothing but torch and this project:
the package that it wraps is imported inside.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from measure import num_processes
from problems import Problem
from torch import Tensor

from longctx_patch.sequence import layout

FASTEST = "the fastest kernel"


class NotCovered(Exception):
    """A candidate doesn't compute this problem; the message says why."""


@dataclass(frozen=True)
class Job:
    """The processes that share a sequence: all of this launch."""

    device: torch.device
    rank: int
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    """What the command line asks for: kernels, plans, configs."""

    @classmethod
    def of_this_process(cls, device: torch.device, settings: dict[str, Any]) -> "Job":
        """The job of all processes that `measure.start` has joined."""
        return cls(
            device, dist.get_rank() if dist.is_initialized() else 0, num_processes(), settings
        )


@dataclass(frozen=True)
class Prepared:
    """A candidate, ready for one problem."""

    positions: Tensor
    """int64 `[L]`: which tokens of the sequence this rank holds."""
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Maps (q_BLHD, k_BLGD, v_BLGD) of these tokens to out_BLHD, differentiably."""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around forward and backward."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention over ranks."""

    name: str
    kernel: str
    """The kernel whose ideal it is compared with; `FASTEST` where it chooses by itself."""
    prepare: Callable[[Problem], Prepared]
    """Collective. Raises NotCovered."""
    problem_of: Callable[[Problem], Problem] = lambda problem: problem
    """What it computes instead of the problem (the ideal: one rank's part)."""
    close: Callable[[], None] = lambda: None
    """Collective; gives back process groups."""


def contiguous(problem: Problem, job: Job) -> Tensor:
    """Positions of this rank's tokens, if each rank holds one run of tokens."""
    return layout.contiguous(problem.num_tokens, job.num_ranks).positions(job.rank, job.device)


def require_plain(problem: Problem, covered: Sequence[str] = ("causal",)) -> None:
    if problem.mask not in covered:
        raise NotCovered(f"{problem.mask}: it covers {', '.join(covered)}")
