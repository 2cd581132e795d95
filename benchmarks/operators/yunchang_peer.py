"""yunchang 0.6.4 (USP): LongContextAttention over each product of degrees.

Of its kernels only FlashAttention has a backward: "torch_flash" and "torch_cudnn" are left out.
"""

from functools import cache, partial
from itertools import product
from typing import Any

import torch
from problems import Problem
from torch import Tensor

from operators import Candidate, Job, NotCovered, Prepared, require_plain, window_of
from operators.flash_attn_2_over_torch import install

KERNELS = {"FA": "torch_flash", "FA3": "flash_attn_3"}


def candidates(job: Job) -> list[Candidate]:
    # A ring of one comes last: in its backward a rank sends to itself, which some backends can't.
    degrees = [
        (ulysses, job.num_ranks // ulysses)
        for ulysses in range(1, job.num_ranks + 1)
        if job.num_ranks % ulysses == 0
    ]
    return [
        Candidate(
            f"ulysses={ulysses},ring={ring}, {name}",
            kernel,
            partial(_prepare, job, name, ulysses, ring),
        )
        for (name, kernel), (ulysses, ring) in product(KERNELS.items(), degrees)
    ]


def _prepare(job: Job, kernel: str, ulysses: int, ring: int, problem: Problem) -> Prepared:
    # A window inside each block of a ring is another mask than one over the sequence.
    require_plain(problem, ("causal", "window") if ring == 1 else ("causal",))
    if problem.num_kv_heads % ulysses:
        raise NotCovered(f"{problem.num_kv_heads} key-value heads over {ulysses} ranks")
    install()
    import yunchang
    from yunchang.globals import HAS_FLASH_ATTN_HOPPER
    from yunchang.kernels import AttnType

    if kernel == "FA3" and not HAS_FLASH_ATTN_HOPPER:
        raise NotCovered("flash-attn 3 (flash_attn_interface) isn't installed")
    _set_groups(yunchang, ulysses, ring, job)
    attention = yunchang.LongContextAttention(
        ring_impl_type="zigzag", attn_type=getattr(AttnType, kernel)
    )
    tokens = torch.arange(problem.num_tokens, device=job.device).view(1, -1, 1)
    positions = yunchang.EXTRACT_FUNC_DICT["zigzag"](
        tokens, job.rank, job.num_ranks, rd=ring, ud=ulysses
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, window_size=window_of(problem))

    return Prepared(positions.flatten(), run)


@cache
def _groups(yunchang: Any, ulysses: int, ring: int, rank: int, num_ranks: int) -> tuple[Any, Any]:
    """Process groups of these degrees, made once."""
    from yunchang.globals import PROCESS_GROUP

    yunchang.set_seq_parallel_pg(ulysses, ring, rank, num_ranks)
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


def _set_groups(yunchang: Any, ulysses: int, ring: int, job: Job) -> None:
    """Put the groups into the singleton in which yunchang looks them up."""
    from yunchang.globals import PROCESS_GROUP

    groups = _groups(yunchang, ulysses, ring, job.rank, job.num_ranks)
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = groups
