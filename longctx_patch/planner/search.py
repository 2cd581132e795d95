"""Every way worth trying to train a model on a cluster, with what it takes and whether it fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from longctx_patch.memory import MARGIN, LayerPolicy
from longctx_patch.memory.auto import after_climbs
from longctx_patch.memory.offload import RESERVE
from longctx_patch.planner.candidate import Candidate, Job
from longctx_patch.planner.components import Components, host_bytes, predict_memory
from longctx_patch.planner.machine import GIB
from longctx_patch.planner.steptime import Attention, StepTime, predict_attention, predict_time

CONTEXT_BYTES = 2.5 * GIB
"""Of a GPU's memory, that CUDA, NCCL and kernels take for themselves."""
TILE_SHARE = 1 / 16
"""Of a GPU's memory, that the inner tensors of an MLP's tile may take (`memory/tiled_mlp.py`)."""
CHECKPOINTS: tuple[LayerPolicy, ...] = ("none", "attention", "offload", "full")
SAME = 0.02
"""Attention as fast to within this share counts as equal."""
STEP_TOKENS = 1024
"""Longest rows are searched for in multiples of these."""
MOST_TOKENS = 2**30


@dataclass(frozen=True)
class Result:
    """A candidate, and what it takes."""

    job: Job
    candidate: Candidate
    memory: Components
    host_bytes: float
    """Of one machine."""
    time: StepTime
    reason: str | None
    """Why it does not fit; None: it does."""

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def rows_at_once(self) -> int:
        return self.job.cluster.num_gpus // self.candidate.sequence_degree

    @property
    def tokens_per_second_per_gpu(self) -> float:
        tokens = self.rows_at_once * self.job.seq_len
        return tokens / self.time.total / self.job.cluster.num_gpus

    @property
    def mfu(self) -> float:
        """Of the peak of the data sheet, for a causal row without recompute."""
        flops = self.job.step_flops * self.rows_at_once
        return flops / self.time.total / self.job.cluster.num_gpus / self.job.cluster.gpu.peak_flops


def search(job: Job) -> list[Result]:
    """All candidates: those that fit first, the fastest first; then those nearest to fitting."""
    results = [result for degrees in _degrees(job) for result in _of_degrees(job, *degrees)]
    return sorted(results, key=_order)


def longest(job: Job) -> int:
    """Tokens of the longest row for which a candidate fits; 0 where none does.

    Found by halving: what a candidate takes grows with the row.
    """

    def fits(steps: int) -> bool:
        return any(result.fits for result in search(replace(job, seq_len=steps * STEP_TOKENS)))

    low, high = 0, 1
    while high * STEP_TOKENS <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP_TOKENS


def usable_bytes(job: Job) -> float:
    """That tensors may take on a GPU: less than its memory by `CONTEXT_BYTES` and `MARGIN`."""
    return (1 - MARGIN) * (job.cluster.gpu.memory_bytes - CONTEXT_BYTES)


def _order(result: Result) -> tuple[bool, float]:
    if result.fits:
        return False, -result.tokens_per_second_per_gpu
    return True, result.memory.total


def _degrees(job: Job) -> Iterator[tuple[int, int]]:
    """(Ulysses, ring) for each number of GPUs that share a row, whichever is faster."""
    num_gpus, per_node = job.cluster.num_gpus, job.cluster.gpus_per_node
    for degree in range(1, num_gpus + 1):
        if num_gpus % degree or degree > job.seq_len:
            continue
        ways = [
            (ulysses, degree // ulysses)
            for ulysses in range(1, min(degree, per_node) + 1)
            if degree % ulysses == 0 and job.shape.num_kv_heads % ulysses == 0
        ]

        def seconds(way: tuple[int, int]) -> float:
            attention = _attention(job, *way)
            return attention.forward.makespan_s + attention.backward.makespan_s

        # Where both are as fast Ulysses, which `longctx patch` takes too.
        fastest = min(map(seconds, ways))
        yield max(way for way in ways if seconds(way) <= fastest * (1 + SAME))


@lru_cache(maxsize=4096)
def _attention(job: Job, ulysses: int, ring: int) -> Attention:
    return predict_attention(job, ulysses, ring)


def _of_degrees(job: Job, ulysses: int, ring: int) -> Iterator[Result]:
    attention, num_layers = _attention(job, ulysses, ring), job.shape.num_layers
    none: tuple[LayerPolicy, ...] = ("none",)
    whole = Candidate(
        ulysses=ulysses,
        ring=ring,
        plan=attention.plan,
        checkpoint="none",
        policies=none * num_layers,
    )
    tokens = -(-job.seq_len // (ulysses * ring))
    tiled = _tiles(job, tokens)
    states = (False,) if job.lora or job.cluster.num_gpus == 1 else (False, True)
    for tiles in sorted({1, tiled}):
        for offload_states in states:
            start = replace(whole, mlp_tiles=tiles, offload_states=offload_states)
            for name in CHECKPOINTS:
                same = replace(start, checkpoint=name, policies=(name,) * num_layers)
                yield _result(job, same, tokens, attention)
            yield _auto(job, start, tokens, attention)


def _auto(job: Job, start: Candidate, tokens: int, attention: Attention) -> Result:
    """As `memory/auto.py` decides: as many climbs as fit."""
    num_layers = job.shape.num_layers
    for climbs in range(2 * num_layers, -1, -1):
        policies = after_climbs(climbs, num_layers)
        result = _result(
            job, replace(start, checkpoint="auto", policies=policies), tokens, attention
        )
        if result.fits:
            break
    return result


def _tiles(job: Job, tokens: int) -> int:
    inner = 3 * 2 * job.shape.intermediate_size * tokens
    return max(1, -(-inner // int(TILE_SHARE * job.cluster.gpu.memory_bytes)))


def _result(job: Job, candidate: Candidate, tokens: int, attention: Attention) -> Result:
    memory = predict_memory(job, candidate, tokens, attention.buffer_bytes)
    on_host = host_bytes(job, candidate, tokens)
    return Result(
        job=job,
        candidate=candidate,
        memory=memory,
        host_bytes=on_host,
        time=predict_time(job, candidate, tokens, attention),
        reason=_reason(job, memory, on_host),
    )


def _reason(job: Job, memory: Components, on_host: float) -> str | None:
    usable = usable_bytes(job)
    if memory.total > usable:
        name, most = max(memory.parts().items(), key=lambda part: part[1])
        return (
            f"needs {memory.total / GIB:.0f} GiB of the {usable / GIB:.0f} that tensors may take "
            f"on a GPU; most of it {name} ({most / GIB:.0f})"
        )
    available = job.cluster.host_bytes
    if available is not None and on_host > (1 - RESERVE) * available:
        return (
            f"needs {on_host / GIB:.0f} GiB of the {(1 - RESERVE) * available / GIB:.0f} that may "
            "be taken on a host"
        )
    return None
