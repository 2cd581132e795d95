"""Time distributed attention, forward and backward, for plans and lengths.

    torchrun --nproc_per_node 4 benchmarks/plans.py --lengths 16384 65536 131072 \\
        --plans zigzag zigzag_direct ring distflash_balanced allgather burst --out plans.json

Every rank of the job shares one sequence; bfloat16 on CUDA, float32 on CPU. A plan's output and
gradients are compared with those of the first plan at the same length, and the bytes it sent with
what it predicts: a difference stops the run. Legend: B batch (1), L tokens of this rank, H query
heads, G key-value heads, D head dim, K random signs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import (
    Clock,
    Row,
    dtype_on,
    everyone,
    finish,
    is_first_rank,
    machine,
    make_parser,
    num_processes,
    start,
    write_json,
)
from torch import Tensor

from longctx_patch import LongContextConfig, attention, make_sequence_group
from longctx_patch.choose.chooser import choose
from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.plans import Direction
from longctx_patch.plans.traffic import Traffic
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.hardware import PRESETS

NUM_SIGNS = 8
SHARPNESS = 3.0  # standard deviation of the logits
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # some times what rounding does
RESULTS = ("out", "dq", "dk", "dv")

Sketches = dict[str, Tensor]
"""By the name of a result: `sketch` of it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The attention of one sequence."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def flops(self, direction: Direction) -> int:
        """Of all ranks: two matrix products per pair forward, five backward (FlashAttention-2)."""
        pairs = self.num_tokens * (self.num_tokens + 1) // 2
        products = 2 if direction is Direction.FORWARD else 5
        return 2 * products * pairs * self.num_heads * self.head_dim


class Shards(NamedTuple):
    """One rank's tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def predicted_seconds(
    config: LongContextConfig, direction: Direction, problem: Problem
) -> float | None:
    """What the cost model says that `direction` takes on this machine; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    workload = Workload(
        num_tokens=problem.num_tokens,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
    )
    name = torch.cuda.get_device_name().lower()
    hardware = next((preset for key, preset in PRESETS.items() if key in name), None)
    if hardware is None:
        return None
    setting = choose(config, direction, workload)
    return predict(setting, direction, workload, hardware).makespan_s


def settings(plan: str, num_ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Fields of the config that a name on the command line stands for."""
    if plan == "ulysses":
        return {"ulysses_degree": num_ranks}
    if plan == "ulysses2":
        return {"ulysses_degree": 2, "ring_degree": num_ranks // 2}
    ring: dict[str, Any] = {"ring_degree": num_ranks}
    if plan == "burst":  # a backward; its forward is the ring
        return ring | {"plan": "zigzag", "backward_plan": "burst"}
    if plan == "double_ring":
        return ring | {"plan": plan, "ranks_per_node": ranks_per_node}
    return ring | {"plan": plan}


def make_config(plan: str, num_ranks: int, ranks_per_node: int) -> LongContextConfig:
    """Raises ValueError if there is no such plan, or not for this number of ranks."""
    config = LongContextConfig(**settings(plan, num_ranks, ranks_per_node))
    if config.sequence_degree != num_ranks:
        raise ValueError(
            f"{plan} on {num_ranks} ranks: its degrees make {config.sequence_degree} ranks. "
            "Start an even number of processes."
        )
    return config


def make_shards(problem: Problem, group: SequenceGroup, device: torch.device) -> Shards:
    """This rank's tokens of tensors that are the same under every plan.

    Queries are scaled so that a few keys dominate each row: under flat attention the outputs of
    late tokens are means of thousands of values, near zero whatever was computed.
    """
    layout = group.layout(problem.num_tokens)

    def shard(seed: int, heads: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (1, problem.num_tokens, heads, problem.head_dim)
        whole = torch.randn(shape, generator=generator, dtype=dtype_on(device), device=device)
        return layout.shard(whole, group.group_rank, 1) * scale

    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    shards = Shards(
        shard(0, heads, SHARPNESS), shard(1, kv_heads), shard(2, kv_heads), shard(3, heads)
    )
    for x in shards[:3]:
        x.requires_grad_()
    return shards


def sketch(x_BLHD: Tensor, token_signs_KL: Tensor) -> Tensor:
    """K * K random signed sums of all ranks' elements, then the sum of squares; float64.

    Squares of the signed sums of a difference are, on average, its own sum of squares, so few
    numbers tell how far two tensors are apart (Alon, Matias and Szegedy 1996).
    """
    heads, head_dim = x_BLHD.shape[2:]
    signs_KHD = random_signs(5, heads * head_dim, x_BLHD.device).unflatten(1, (heads, head_dim))
    sums_KK = x_BLHD.new_zeros((NUM_SIGNS, NUM_SIGNS), dtype=torch.float64)
    for head in range(heads):  # one at a time, for a float64 copy of all would be large
        sums_KK += token_signs_KL @ x_BLHD[0, :, head].double() @ signs_KHD[:, head].T
    square = torch.linalg.vector_norm(x_BLHD, dtype=torch.float64) ** 2
    numbers = torch.cat([sums_KK.flatten(), square[None]])
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return numbers


def random_signs(seed: int, size: int, device: torch.device) -> Tensor:
    """float64 `[K, size]` of +1 and -1, the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.randint(2, (NUM_SIGNS, size), generator=generator, device=device)
    return 2.0 * bits.double() - 1.0


def difference(mine: Tensor, other: Tensor) -> float:
    """Estimate of |x - y| / |y| from their sketches, or how far their norms differ if that is more.

    NaN if either has one.
    """
    norm = other[-1].sqrt()
    apart = (mine[:-1] - other[:-1]).norm() / NUM_SIGNS / norm
    return float(torch.maximum(apart, (mine[-1].sqrt() / norm - 1).abs()))


def largest_difference(plan: str, mine: Sketches, first: Sketches, tolerance: float) -> float:
    """Raises RuntimeError if a result differs from the first plan's by more than rounding."""
    differences = {name: difference(mine[name], first[name]) for name in RESULTS}
    for name, value in differences.items():
        if not value <= tolerance:  # also NaN
            raise RuntimeError(
                f"{plan}: {name} differs from the first plan's by {value:.3g}, allowed is "
                f"{tolerance:g}. One of the two is wrong: hold both against dense attention, as "
                "tests/test_operator.py does."
            )
    return max(differences.values())


@dataclass(frozen=True)
class Case:
    """One plan at one length, ready to run. Every method is collective."""

    group: SequenceGroup
    problem: Problem
    shards: Shards

    @property
    def device(self) -> torch.device:
        return self.shards.q.device

    def forward(self) -> Tensor:
        q, k, v, _ = self.shards
        num_tokens = self.problem.num_tokens
        out, _ = attention(q, k, v, group=self.group, num_tokens=num_tokens, check_ranks=False)
        return out

    def calls(self) -> Iterator[tuple[Direction, Callable[[], tuple[Tensor, ...]]]]:
        """Each direction alone: forward without a graph, backward over one that is kept."""

        @torch.no_grad()
        def forward() -> tuple[Tensor, ...]:
            return (self.forward(),)

        yield Direction.FORWARD, forward
        q, k, v, dout = self.shards
        out = self.forward()
        yield (
            Direction.BACKWARD,
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        )

    def sketches(self, results: Sequence[Tensor]) -> Sketches:
        """Of (out, dq, dk, dv)."""
        num_tokens = self.problem.num_tokens
        signs = random_signs(4, num_tokens, self.device)
        mine = self.group.layout(num_tokens).shard(signs, self.group.group_rank, 1)
        return {name: sketch(x, mine) for name, x in zip(RESULTS, results, strict=True)}

    def traffic(self, direction: Direction, sent: Traffic) -> list[Traffic]:
        """What each rank sent, which is what the plan predicts."""
        itemsize = self.shards.q.itemsize
        call = self._call().predicted_traffic(1, self.problem.head_dim, itemsize)
        predicted = call.forward if direction is Direction.FORWARD else call.backward
        ranks = everyone((sent, predicted))
        for rank, (found, expected) in enumerate(ranks):
            assert found == expected, (
                f"{self.group.config} {direction.value}: rank {rank} sent {found}, not {expected}"
            )
        return [found for found, _ in ranks]

    def num_steps(self, direction: Direction) -> int:
        plan = self._call().waves_for(self.shards.q)[0].plan_for(direction, self.shards.q)
        return len(plan.rank_steps[self.group.ring.group_rank])

    def _call(self) -> AttentionCall:
        problem = self.problem
        scale = problem.head_dim**-0.5
        heads = (problem.num_heads, problem.num_kv_heads)
        return AttentionCall.causal(self.group, problem.num_tokens, scale, *heads, returns_lse=True)


def run_case(case: Case, clock: Clock) -> tuple[list[Row], Sketches]:
    """A row for each direction, and what the results were. Collective."""
    rows, results = [], []
    for direction, call in case.calls():
        case.group.counters.reset()
        results += [result.detach() for result in call()]
        counters = case.group.counters
        traffic = case.traffic(direction, Traffic(counters.messages, counters.bytes))
        timing, host = clock.device_time(call), clock.host_time(call)
        num_steps = case.num_steps(direction)
        flops = case.problem.flops(direction) / case.group.num_ranks
        rows.append(
            {
                "direction": direction.value,
                **asdict(case.problem),
                "num_ranks": case.group.num_ranks,
                "iterations": clock.iterations,
                **timing._asdict(),
                "predicted_s": predicted_seconds(case.group.config, direction, case.problem),
                "tflops_per_s_per_rank": flops / timing.seconds * 1e-12,
                "num_steps": num_steps,
                "host_s": host.seconds,
                "host_s_per_step": host.seconds / num_steps,
                "bytes_per_rank": [rank.bytes for rank in traffic],
                "messages_per_rank": [rank.messages for rank in traffic],
                "config": asdict(case.group.config),
            }
        )
    return rows, case.sketches(results)


def run_length(groups: dict[str, SequenceGroup], problem: Problem, clock: Clock) -> list[Row]:
    """All plans at one length; the first sets what the others' results must be."""
    measured: list[Row] = []
    first: Sketches | None = None
    for plan, group in groups.items():
        shards = make_shards(problem, group, clock.device)
        rows, sketches = run_case(Case(group, problem, shards), clock)
        first = first or sketches
        tolerance = TOLERANCE[dtype_on(clock.device)]
        largest = largest_difference(plan, sketches, first, tolerance)
        for row in rows:
            compared = {"largest_difference": largest, "compared_with": next(iter(groups))}
            measured.append({"plan": plan, **row, **compared, **machine(clock.device)})
    return measured


def print_table(rows: Sequence[Row]) -> None:
    lines = [
        "plan               direction   tokens        ms  p20-p80 ms         predicted  TFLOP/s  "
        "steps  host us/step  MiB sent  difference"
    ]
    for row in rows:
        predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s'] * 1e3:.3f}"
        spread = f"{row['p20_s'] * 1e3:.3f}-{row['p80_s'] * 1e3:.3f}"
        lines.append(
            f"{row['plan']:18} {row['direction']:9} {row['num_tokens']:8} "
            f"{row['seconds'] * 1e3:9.3f}  {spread:17} {predicted:>10} "
            f"{row['tflops_per_s_per_rank']:8.2f} {row['num_steps']:6} "
            f"{row['host_s_per_step'] * 1e6:13.1f} {max(row['bytes_per_rank']) / 2**20:9.2f} "
            f"{row['largest_difference']:11.1e}"
        )
    print("\n".join(lines))


def make_groups(
    plans: Sequence[str], ranks_per_node: int, *, warn: bool
) -> dict[str, SequenceGroup]:
    """By plan; a plan that there is not, or not for this many ranks, is left out with a warning."""
    groups = {}
    for plan in plans:
        try:
            config = make_config(plan, num_processes(), ranks_per_node)
        except ValueError as error:
            if warn:
                print(f"left out: {plan}: {error}", file=sys.stderr)
            continue
        groups[plan] = make_sequence_group(config)
    return groups


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="global tokens")
    parser.add_argument(
        "--plans",
        nargs="+",
        required=True,
        help="plans of LongContextConfig; also ulysses, and ulysses2 (times a ring)",
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks-per-node", type=int, default=2, help="of double_ring (default 2)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    clock = Clock(start(), arguments.iterations)
    speaks = is_first_rank()
    groups = make_groups(arguments.plans, arguments.ranks_per_node, warn=speaks)
    rows: list[Row] = []
    try:
        for num_tokens in arguments.lengths:
            problem = Problem(
                num_tokens=num_tokens,
                num_heads=arguments.heads,
                num_kv_heads=arguments.kv_heads,
                head_dim=arguments.head_dim,
            )
            rows += run_length(groups, problem, clock)
    finally:  # a failure leaves the lengths that were done before it
        if speaks:
            print_table(rows)
            write_json(rows, arguments.out)
    for group in groups.values():
        group.close()
    finish()


if __name__ == "__main__":
    main()
