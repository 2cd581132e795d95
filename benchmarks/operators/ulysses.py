"""Plain Ulysses (Jacobs et al. 2023): all-to-all to heads, one kernel, all-to-all to tokens.

Nothing overlaps. It is the simplest operator over the same kernels, which ours must beat.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from problems import Problem
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.attention import SDPBackend, sdpa_kernel

from operators import Candidate, Job, NotCovered, Prepared, contiguous, require_plain

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}


def candidates(job: Job) -> list[Candidate]:
    """One candidate for each kernel that torch has."""
    return by_kernel(job, partial(_prepare, job))


def by_kernel(job: Job, prepare: Callable[[SDPBackend, Problem], Prepared]) -> list[Candidate]:
    """A candidate for each of torch's kernels on this device, by its name."""
    kernels = KERNELS if job.device.type == "cuda" else {"torch_cpu": SDPBackend.FLASH_ATTENTION}
    return [Candidate(name, name, partial(prepare, backend)) for name, backend in kernels.items()]


def _prepare(job: Job, backend: SDPBackend, problem: Problem) -> Prepared:
    require_plain(problem)
    if problem.num_kv_heads % job.num_ranks:
        raise NotCovered(f"{problem.num_kv_heads} key-value heads over {job.num_ranks} ranks")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_to_heads(x).transpose(1, 2) for x in (q, k, v))
        out = causal_attention(q, k, v, backend)
        return _to_tokens(out.transpose(1, 2))

    return Prepared(contiguous(problem, job), run)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """torch's attention of one kernel over `[B, H, N, D]`."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def _to_heads(x_BLHD: Tensor) -> Tensor:
    """`[B, L, H, D]` to `[B, L * ranks, H / ranks, D]`, for B of 1."""
    ranks = dist.get_world_size()
    sent = x_BLHD[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return all_to_all_single(torch.empty_like(sent), sent).flatten(0, 1)[None]


def _to_tokens(x_BNHD: Tensor) -> Tensor:
    """`[B, L * ranks, H / ranks, D]` to `[B, L, H, D]`, for B of 1."""
    ranks = dist.get_world_size()
    sent = x_BNHD[0].unflatten(0, (ranks, -1)).contiguous()
    return all_to_all_single(torch.empty_like(sent), sent).transpose(0, 1).flatten(1, 2)[None]
