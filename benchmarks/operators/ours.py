"""This project's operator: every plan and product of degrees that fits the ranks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from config_text import config_of, name_of
from problems import Problem
from torch import Tensor

from longctx_patch import Documents, LongContextConfig, make_sequence_group
from longctx_patch.engine.autograd import distributed_attention
from longctx_patch.engine.call import AttentionCall, CallShape
from longctx_patch.engine.decided import decided_call, row_mask
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.kernels import Score
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import PLANS, SPARSE_PLAN, plan_for
from operators import FASTEST, Candidate, Job, NotCovered, Prepared

USUAL = (
    "auto",
    "zigzag",
    "zigzag_direct",
    "distflash_balanced",
    "allgather",
    "burst",
    "double_ring",
)
"""The plans of the grid, unless others are asked for; `halo`, `distflash`, `striped` and `ring` do
worse on causal rows. Documents and windows run `halo` under `auto`."""


def candidates(job: Job) -> list[Candidate]:
    """The configs that were asked for, or the grid of degrees, plans and kernels."""
    texts = job.settings.get("configs") or [
        name_of(fields)
        for kernel in job.settings.get("kernels") or ("auto",)
        for fields in grid(job.num_ranks, job.settings.get("plans") or USUAL, kernel)
    ]
    return [_candidate(text, job) for text in texts]


def grid(num_ranks: int, plans: Sequence[str], kernel: str) -> Iterator[dict[str, Any]]:
    """Fields of LongContextConfig: each degree of Ulysses with each plan for the ring that is left.

    Plans that their own rules exclude at a degree are left out.
    """
    for ulysses in (n for n in range(num_ranks, 0, -1) if num_ranks % n == 0):
        ring = num_ranks // ulysses
        for plan in plans if ring > 1 else ("auto",):
            fields: dict[str, Any] = {"ulysses_degree": ulysses, "ring_degree": ring, "plan": plan}
            record = PLANS.get(plan)
            if record is not None and Direction.FORWARD not in record.directions:
                forward = plan_for(plan, Direction.FORWARD, record.layouts[0])
                fields |= {"plan": forward, "backward_plan": plan}
            if record is not None and record.needs_full_nodes:
                fields |= {"ranks_per_node": ring // 2}
                if ring < 4 or ring % 2:
                    continue
            if kernel != "auto":
                fields |= {"kernel": kernel}
            yield fields


def _candidate(text: str, job: Job) -> Candidate:
    config = config_of(text)
    # Made at first use, since most of a grid may be filtered out.
    group = cache(partial(make_sequence_group, config))

    def close() -> None:
        if group.cache_info().currsize:
            group().close()
            group.cache_clear()

    kernel = FASTEST if config.kernel == "auto" else config.kernel
    return Candidate(text, kernel, partial(_prepare, config, group, job), close=close)


def _prepare(
    config: LongContextConfig, make_group: Callable[[], SequenceGroup], job: Job, problem: Problem
) -> Prepared:
    if config.sequence_degree != job.num_ranks:
        raise NotCovered(f"{config.sequence_degree} ranks share a sequence, not {job.num_ranks}")
    if problem.mask == "window" and config.plan not in ("auto", SPARSE_PLAN):
        raise NotCovered(f"layers with a window run {SPARSE_PLAN} under any plan")
    group = make_group()
    documents = Documents.one(problem.num_tokens)
    if problem.lengths is not None:
        documents = Documents(problem.lengths, problem.num_tokens)
    mask, score = row_mask(None, documents, problem.window), Score(problem.head_dim**-0.5)
    is_local = problem.window is not None

    @cache
    def call(shape: CallShape) -> AttentionCall:  # as the layers of a patched model make it
        return decided_call(group, documents, mask, score, shape, is_local=is_local)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed_attention(q, k, v, None, call(CallShape.of(q, k, v)))[0]

    positions = group.layout(documents).positions(group.group_rank, job.device)
    return Prepared(positions, run)
