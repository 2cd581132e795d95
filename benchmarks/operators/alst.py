"""DeepSpeed's Ulysses layer as ALST runs it under transformers (`UlyssesSPAttentionHF`).

Its core attention is torch's over cuDNN or flash for causal rows (transformers' "sdpa"), and
FlashAttention-2 for documents and windows (transformers' "flash_attention_2").
"""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from problems import Problem
from torch import Tensor
from torch.nn.attention import SDPBackend

from operators import (
    Candidate,
    Job,
    NotCovered,
    Prepared,
    contiguous,
    edges_of,
    require_plain,
    window_of,
)
from operators.ulysses import by_kernel, causal_attention

Core = Callable[..., tuple[Tensor, None]]


def candidates(job: Job) -> list[Candidate]:
    def causal(backend: SDPBackend, problem: Problem) -> Prepared:
        return _prepare(job, ("causal",), partial(_sdpa, backend), problem)

    flash = partial(_prepare, job, ("packed", "window"), None)
    return [*by_kernel(job, causal), Candidate("flash_attn 2", "torch_flash", flash)]


def _prepare(job: Job, masks: tuple[str, ...], core: Core | None, problem: Problem) -> Prepared:
    require_plain(problem, masks)
    kv_heads, ranks = problem.num_kv_heads, job.num_ranks
    if problem.num_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise NotCovered(f"{problem.num_heads}/{kv_heads} heads over {ranks} ranks")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # none of DeepSpeed's ops is compiled here
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    layer = UlyssesSPAttentionHF(
        attn=_flash(problem, job) if core is None else core,
        batch_size=1,
        attn_head_count=problem.num_heads,
        attn_head_size=problem.head_dim,
        kv_head_count=kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    positions = contiguous(problem, job)
    module = SimpleNamespace(training=True, num_key_value_groups=problem.num_heads // kv_heads)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = layer(module, q, k, v, None, position_ids=positions[None])
        return out.unflatten(2, (problem.num_heads, problem.head_dim))

    return Prepared(positions, run)


def _sdpa(
    backend: SDPBackend, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute what transformers' sdpa function does without a mask: out `[B, N, H, D]`."""
    return causal_attention(q, k, v, backend).transpose(1, 2).contiguous(), None


def _flash(problem: Problem, job: Job) -> Core:
    """Make a function that does what transformers' flash_attention_2 does for known documents."""
    from operators.flash_attn_2_over_torch import install

    install()
    from flash_attn import flash_attn_varlen_func

    edges, longest = edges_of(problem, job), max(problem.lengths or (problem.num_tokens,))
    window = window_of(problem)

    def core(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(
            q, k, v, edges, edges, longest, longest, causal=True, window_size=window
        )
        return out[None], None

    return core
