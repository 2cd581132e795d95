"""ring-flash-attn 0.1.8: the zigzag ring, and Llama 3's all-gather for rows of documents."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

from problems import Problem
from torch import Tensor

from operators import (
    Candidate,
    Job,
    NotCovered,
    Prepared,
    contiguous,
    edges_of,
    require_plain,
    window_of,
    zigzag,
)
from operators.flash_attn_2_over_torch import install

STRIDES = (1, 4)  # key-value heads that are gathered at once; the package's README uses 1


def candidates(job: Job) -> list[Candidate]:
    llama3 = [
        Candidate(f"llama3, {stride} heads at once", "torch_flash", partial(_llama3, job, stride))
        for stride in STRIDES
    ]
    return [Candidate("zigzag", "torch_flash", partial(_zigzag, job)), *llama3]


def _zigzag(job: Job, problem: Problem) -> Prepared:
    require_plain(problem)
    package = _package()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return package.zigzag_ring_flash_attn_func(q, k, v, causal=True)

    return Prepared(zigzag(problem, job), run)


def _llama3(job: Job, stride: int, problem: Problem) -> Prepared:
    if problem.num_kv_heads % stride:
        raise NotCovered(f"{stride} at once don't divide {problem.num_kv_heads} key-value heads")
    package = _package()
    edges = edges_of(problem, job)
    *mine, where = package.llama3_flash_attn_prepare_cu_seqlens(
        edges, causal=True, rank=job.rank, world_size=job.num_ranks
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = package.llama3_flash_attn_varlen_func(
            *(x[0] for x in (q, k, v)),
            *mine,
            heads_k_stride=stride,
            local_k_slice=where,
            causal=True,
            window_size=window_of(problem),
        )
        return out[None]

    return Prepared(contiguous(problem, job), run)


def _package() -> Any:
    """The package without its adapters, which import names that newer transformers lack."""
    install()
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    import ring_flash_attn

    return ring_flash_attn
