"""One kernel on one rank's part of the work, on all GPUs at once, with nothing sent.

Clocks drop when all GPUs are busy, so a kernel that runs on one GPU alone would be too fast.
"""

from functools import partial
from typing import Any

import torch
from measure import dtype_on
from problems import Problem, ideal_row
from torch import Tensor

from longctx_patch.kernels import BackwardInputs, Kernel, KernelRequest, Score, Segments, available
from longctx_patch.kernels.base import CAUSAL_WINDOW
from operators import Candidate, Job, NotCovered, Prepared


def candidates(job: Job) -> list[Candidate]:
    """Every kernel of this machine, or those that were asked for."""
    wanted = job.settings.get("ideal_kernels") or [
        name for name in available() if name not in ("reference", "torch_eager", "flex")
    ]
    return [
        Candidate(
            name,
            name,
            partial(_prepare, job, name),
            problem_of=partial(ideal_row, num_ranks=job.num_ranks),
        )
        for name in wanted
    ]


def _prepare(job: Job, name: str, problem: Problem) -> Prepared:
    kernel = available()[name]
    request = KernelRequest(job.device.type, dtype_on(job.device), problem.head_dim)
    refusal = kernel.refuses(request)
    if refusal is not None:
        raise NotCovered(refusal)
    positions = torch.arange(problem.num_tokens, device=job.device)
    return Prepared(positions, lambda q, k, v: _OneKernel.apply(q, k, v, kernel))


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        length = q.shape[1]
        ctx.kernel = kernel
        ctx.how = (Segments((length,), (length,), CAUSAL_WINDOW), Score(q.shape[3] ** -0.5))
        out, lse = kernel.forward(q, k, v, *ctx.how)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ctx.kernel.backward(BackwardInputs(grads[0], *ctx.saved_tensors), *ctx.how), None
