"""torch's context parallelism (a ring over head-tail chunks), set up as Accelerate does.

It works by replacing `torch.nn.functional.scaled_dot_product_attention` by name while its context
is open, so the function has to be looked up at each call. A reference that was taken before stays
local attention, which looks like four times the ideal speed. CUDA only.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from problems import Problem
from torch import Tensor

from operators import Candidate, Job, NotCovered, Prepared, require_plain
from operators.ulysses import KERNELS, causal_attention

ROTATIONS = ("allgather", "alltoall")


def candidates(job: Job) -> list[Candidate]:
    """Both rotations, each with both kernels that torch's context parallelism takes."""
    return [
        Candidate(f"{rotation}, {kernel}", kernel, partial(_prepare, job, rotation, kernel))
        for rotation, kernel in product(ROTATIONS, KERNELS)
    ]


def _prepare(job: Job, rotation: str, kernel: str, problem: Problem) -> Prepared:
    require_plain(problem)
    if job.device.type != "cuda":
        raise NotCovered("its ring has no CPU kernel")
    if problem.num_tokens % (2 * job.num_ranks):
        raise NotCovered(
            f"{problem.num_tokens} tokens: without a multiple of {2 * job.num_ranks} its load "
            "balancing switches itself off"
        )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (job.num_ranks,), mesh_dim_names=("cp",))
    positions = torch.arange(problem.num_tokens, device=job.device)[None]
    with _scope(mesh, rotation, positions):  # cuts it in place: the placement need not be known
        pass

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return causal_attention(q, k, v, KERNELS[kernel]).transpose(1, 2)

    def scope() -> AbstractContextManager[None]:
        return _scope(mesh, rotation, torch.empty(1, problem.num_tokens, device=job.device))

    return Prepared(positions[0], run, scope)


@contextmanager
def _scope(mesh: Any, rotation: str, buffer: Tensor) -> Iterator[None]:
    """Attention inside is over all ranks, forward and backward. `[1, N]` becomes `[1, L]`."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}):
        yield
