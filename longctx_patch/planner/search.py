"""Every way worth trying to train a model on a cluster, with what it takes and whether it fits."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from longctx_patch.config import LongContextConfig
from longctx_patch.memory.ladder import after_climbs
from longctx_patch.memory.limits import MARGIN, RESERVE, tiles_that_fit
from longctx_patch.memory.policies import POLICIES, Policy
from longctx_patch.planner.degrees import TIE, Way, best_way, decide
from longctx_patch.planner.job import Candidate, Job
from longctx_patch.planner.layer_bytes import BF16
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.recurrent_cost import (
    RecurrentWork,
    predict_decided,
)
from longctx_patch.planner.step_memory import (
    Components,
    host_bytes,
    how_loaded,
    loading_bytes,
    predict_memory,
)
from longctx_patch.planner.step_time import StepTime, predict_attention, predict_time
from longctx_patch.rules.number_rules import MOST_TOKENS
from longctx_patch.sequence.documents import Documents

CONTEXT_BYTES = 2.5 * GIB
"""What CUDA, NCCL and kernels take of a GPU's memory for themselves."""
STEP_TOKENS = 1024
"""The longest row is searched for in multiples of this."""
LONG = 2**20
"""The first guess at the longest row that fits, in tokens."""


def possible_degrees(job: Job) -> list[int]:
    """Numbers of GPUs that may share a row: their groups lie within nodes or take whole nodes, and
    all groups train as many rows in a step.

    Raises ValueError if there is none, which takes more GPUs than a row has tokens.
    """
    left = left_out(job)
    found = [degree for degree in _divisors(job) if degree not in left]
    if not found:
        reasons = "; ".join(f"{degree}: {reason}" for degree, reason in left.items())
        raise ValueError(
            f"rows of {job.seq_len} tokens on {job.cluster}: no number of GPUs may share a row "
            f"({reasons}). Use fewer GPUs, or another number of rows per step."
        )
    return found


def left_out(job: Job) -> dict[int, str]:
    """Says why some divisors of the number of GPUs are no such numbers."""
    found = {degree: _problem(job, degree) for degree in _divisors(job)}
    return {degree: problem for degree, problem in found.items() if problem is not None}


def _divisors(job: Job) -> list[int]:
    num_gpus = job.cluster.num_gpus
    return [d for d in range(1, min(num_gpus, job.seq_len) + 1) if num_gpus % d == 0]


def _problem(job: Job, degree: int) -> str | None:
    per_node, at_once = job.cluster.gpus_per_node, job.replicas(degree)
    if not job.cluster.fills_nodes(degree):
        return f"groups of {degree} GPUs would lie across nodes of {per_node}"
    if not job.divides(degree):
        return f"{at_once} rows at once don't divide {job.rows_per_step} rows a step"
    return None


@dataclass(frozen=True)
class Result:
    """A candidate, and what it takes."""

    job: Job
    candidate: Candidate
    memory: Components
    host_bytes: float
    """Memory taken of one machine's host while training."""
    loading_bytes: float
    """The same while weights are loaded."""
    time: StepTime
    reason: str | None
    """Why it does not fit; None: it does."""

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def shortfall(self) -> float:
        """Memory needed as a share of usable memory, of a GPU or a host; it fits at 1 or less."""
        shares = [self.memory.total / usable_bytes(self.job)]
        if self.job.cluster.host_bytes is not None:
            most = max(self.host_bytes, self.loading_bytes)
            shares.append(most / _usable_host_bytes(self.job.cluster.host_bytes))
        return max(shares)

    @property
    def rows_at_once(self) -> int:
        return self.job.replicas(self.candidate.sequence_degree)

    @property
    def forwards(self) -> int:
        """Forwards of each GPU in a step."""
        return self.job.forwards(self.candidate.sequence_degree)

    @property
    def num_rows(self) -> int:
        """Rows of a step, over all GPUs."""
        return self.job.rows(self.candidate.sequence_degree)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        tokens = self.num_rows * self.job.seq_len
        return tokens / self.time.total / self.job.cluster.num_gpus

    @property
    def mfu(self) -> float:
        """FLOP/s of causal rows, without recompute, as a share of the data sheet's peak."""
        cluster, flops = self.job.cluster, self.job.step_flops * self.num_rows
        return flops / self.time.total / cluster.num_gpus / cluster.hardware.peak_flops


def search(job: Job) -> list[Result]:
    """All candidates: those that fit first, the fastest first; then those nearest to fitting."""
    results = [result for way in _ways(job) for result in _of_way(job, way)]
    return _ordered(results)


def longest(job: Job, most: int = MOST_TOKENS) -> int:
    """Tokens of the longest row, up to `most`, for which a candidate fits; 0 where none does.

    Found by bisection, since what a candidate takes grows with the row. Rows are shared by all
    GPUs, which takes the least memory of a GPU and of a host.
    """
    # How the GPUs share a row is decided for a long row and once more for the one found, not for
    # each that is tried, because simulating every way takes most of the time here.
    way = _best_way(replace(job, seq_len=LONG), job.cluster.num_gpus)
    tokens = _longest(job, most, way)
    for _ in range(2):
        found = way
        way = _best_way(replace(job, seq_len=tokens), job.cluster.num_gpus) if tokens else way
        if way == found:
            return tokens
        tokens = _longest(job, most, way)
    return _longest(job, most)


def fastest_shared(job: Job) -> Result | None:
    """The fastest candidate that fits in which all GPUs share each row, as in `longest`."""
    results = list(_of_way(job, _best_way(job, job.cluster.num_gpus)))
    return next((result for result in _ordered(results) if result.fits), None)


def _longest(job: Job, most: int, way: Way | None = None) -> int:
    """Tokens of the longest row that fits in one way, or each in the way that is best for it."""

    def fits(steps: int) -> bool:
        longer = replace(job, seq_len=steps * STEP_TOKENS)
        its = way or _best_way(longer, job.cluster.num_gpus)
        return any(result.fits for result in _of_way(longer, its))

    low, high = 0, 1
    while high * STEP_TOKENS <= most and fits(high):
        low, high = high, min(2 * high, max(most // STEP_TOKENS, high + 1))
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP_TOKENS


def usable_bytes(job: Job) -> float:
    """Returns what tensors may take on a GPU: its memory without `CONTEXT_BYTES` and `MARGIN`."""
    return (1 - MARGIN) * (job.cluster.hardware.memory_bytes - CONTEXT_BYTES)


def _ordered(results: Sequence[Result]) -> list[Result]:
    """Those that fit, the fastest first, then those nearest to fitting. Results at most `TIE`
    slower than the fastest, and then than the fastest of the others, count as equally fast: of
    these, those with states on the GPUs come first, then those that take the least of the host,
    then the fastest."""
    fast = deque(sorted((result for result in results if result.fits), key=_slowness))
    found: list[Result] = []
    while fast:
        limit, equal = (1 + TIE) * _slowness(fast[0]), list[Result]()
        while fast and _slowness(fast[0]) <= limit:
            equal.append(fast.popleft())
        found += sorted(equal, key=lambda each: (each.candidate.offload_states, each.host_bytes))
    nearest = (result for result in results if not result.fits)
    return found + sorted(nearest, key=lambda each: (each.shortfall, each.memory.total))


def _slowness(result: Result) -> float:
    return 1 / result.tokens_per_second_per_gpu


def _ways(job: Job) -> Iterator[Way]:
    """The best way for each number of GPUs that may share a row."""
    for degree in possible_degrees(job):
        yield _best_way(job, degree)


def _best_way(job: Job, degree: int) -> Way:
    """The way that `longctx patch` takes for causal rows."""
    hardware, work, shape = job.cluster.seen_by(degree), _recurrent_work(job), job.shape
    recurrent = {} if work is None else {work: float(shape.num_recurrent)}
    return best_way({job.workload: shape.num_attending}, hardware, degree, recurrent)


def _recurrent_work(job: Job) -> RecurrentWork | None:
    """The recurrence of one layer, if there is one."""
    shape = job.shape.recurrence
    return None if shape is None else RecurrentWork(shape, job.row or Documents.one(job.seq_len))


def _of_way(job: Job, way: Way) -> Iterator[Result]:
    """All that layers may keep, recompute and move to the host, for one way to share a row."""
    # Where states go along a ring it can't be striped, as rings are that keep attention for a share
    # of the tokens.
    has_chains = way.ring > 1 and job.shape.recurrence is not None
    kept = [
        (policy.name, share)
        for policy in POLICIES.values()
        for share in _shares(policy)
        if share == 1 or not has_chains
    ]
    for offload_states, (policy, share) in product((False, True) if job.fsdp else (False,), kept):
        config = LongContextConfig(checkpoint=policy, attention_kept=share)
        yield result_of(job, way.applied_to(config), offload_states=offload_states)


def _shares(policy: Policy) -> tuple[float, ...]:
    """The shares of tokens with kept attention that are tried with a policy. Keeping none is worth
    a try where the layers' inputs go to the host."""
    if not policy.keeps_attention:
        return (1.0,)
    return (1.0, 0.5, 0.0) if policy.on_host else (1.0, 0.5)


def result_of(job: Job, config: LongContextConfig, *, offload_states: bool = False) -> Result:
    """Predicts a config. Under `auto`, as in `memory/auto.py`, as many layers climb as fit."""
    degree, checkpoint = config.sequence_degree, config.checkpoint
    hardware, work = job.cluster.seen_by(degree), _recurrent_work(job)
    setting = decide(config, job.workload, hardware)
    num_layers = job.shape.num_layers
    start = Candidate(
        setting=setting,
        checkpoint=checkpoint,
        policies=(POLICIES[checkpoint].rungs[0],) * num_layers,
        mlp_tiles=config.mlp_tiles or usual_tiles(job, degree),
        attention_kept=config.attention_kept,
        offload_states=offload_states,
        recurrence=None if work is None else predict_decided(config, work, hardware),
    )
    if not POLICIES[checkpoint].chooses_by_layer:
        return result_with(job, start)

    def climbed(number: int) -> Result:
        return result_with(job, replace(start, policies=after_climbs(number, num_layers)))

    # A climb takes memory of the GPU and gives some of the host back.
    usable = usable_bytes(job)
    climbs = bisect_left(
        range(1, 2 * num_layers + 1), True, key=lambda n: climbed(n).memory.total > usable
    )
    return climbed(climbs)


def tokens_of_a_rank(job: Job, degree: int) -> int:
    return -(-job.seq_len // degree)


def usual_tiles(job: Job, degree: int) -> int:
    """Counts how many tiles an MLP runs in unless told otherwise."""
    shape = job.shape
    inner = BF16 * shape.num_mlp_products * shape.intermediate_size
    memory = int(job.cluster.hardware.memory_bytes)
    return tiles_that_fit(inner * tokens_of_a_rank(job, degree), memory)


def result_with(job: Job, candidate: Candidate) -> Result:
    """Returns what a candidate takes."""
    attention = predict_attention(job, candidate.setting)
    tokens = tokens_of_a_rank(job, candidate.sequence_degree)
    memory = predict_memory(job, candidate, tokens, attention.buffer_bytes)
    on_host, loading = host_bytes(job, candidate, tokens), loading_bytes(job, candidate)
    return Result(
        job=job,
        candidate=candidate,
        memory=memory,
        host_bytes=on_host,
        loading_bytes=loading,
        time=predict_time(job, candidate, tokens, attention),
        reason=_reason(job, memory, on_host, loading),
    )


def _reason(job: Job, memory: Components, on_host: float, loading: float) -> str | None:
    usable = usable_bytes(job)
    if memory.total > usable:
        name, most = max(memory.parts().items(), key=lambda part: part[1])
        return (
            f"needs {memory.total / GIB:.0f} GiB of the {usable / GIB:.0f} that tensors may take "
            f"on a GPU; most of it {name} ({most / GIB:.0f})"
        )
    available = job.cluster.host_bytes
    if available is not None and max(on_host, loading) > _usable_host_bytes(available):
        when = f" while loading ({how_loaded(job)})" if loading > on_host else ""
        return (
            f"needs {max(on_host, loading) / GIB:.0f} GiB{when} of the "
            f"{_usable_host_bytes(available) / GIB:.0f} that may be taken on a host"
        )
    return None


def _usable_host_bytes(available: float) -> float:
    return (1 - RESERVE) * available
