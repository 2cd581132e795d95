"""plans.py: plans are timed if their results are right."""

from pathlib import Path

import pytest
import torch
from measure import Clock
from torch import Tensor

from benchmarks.plans import (
    RESULTS,
    Case,
    Problem,
    Sketches,
    largest_difference,
    make_config,
    make_shards,
    run_case,
)
from longctx_patch import LongContextConfig, make_sequence_group
from tests.benchmarks.scripts import run_script
from tests.reference import dense_attention

CPU = torch.device("cpu")


def test_plans_over_two_processes(tmp_path: Path) -> None:
    plans = ["zigzag", "ring", "burst", "double_ring", "ulysses", "ulysses2"]
    sizes = ("--lengths", "64", "101", "--heads", "4", "--kv-heads", "2", "--head-dim", "16")
    arguments = (*sizes, "--iterations", "2", "--plans", *plans, "unheard_of")
    rows, printed = run_script("plans.py", 2, tmp_path / "plans.json", *arguments)
    keys = [(row["num_tokens"], row["plan"], row["direction"]) for row in rows]
    directions = ("forward", "backward")
    assert keys == [(n, plan, d) for n in (64, 101) for plan in plans for d in directions]
    block_bytes = 32 * 2 * 2 * 16 * 4  # half of 64 tokens; keys and values; heads, dim, float32
    for row in rows:
        assert 0 < row["p20_s"] <= row["seconds"] <= row["p80_s"]
        assert row["largest_difference"] < 1e-5
        assert row["predicted_s"] is None
        assert row["host_s_per_step"] * row["num_steps"] == pytest.approx(row["host_s"])
        if (row["num_tokens"], row["plan"]) == (64, "ring"):
            # Forward: a block. Backward: of the causal mask's, rank 0 has nothing to add for 1.
            assert row["num_steps"] == (2 if row["direction"] == "forward" else 3)
            sent = [block_bytes] * 2
            if row["direction"] == "backward":
                sent = [block_bytes, 2 * block_bytes]
            assert row["bytes_per_rank"] == sent
    assert "left out: unheard_of" in printed
    assert "choose one of" in printed


@pytest.fixture(scope="module")
def one_process() -> tuple[Case, Sketches, list[Tensor]]:
    """A case on one rank, the sketches it gives, and (out, dq, dk, dv) of dense attention."""
    problem = Problem(num_tokens=97, num_heads=4, num_kv_heads=2, head_dim=8)
    group = make_sequence_group(LongContextConfig())
    case = Case(group, problem, make_shards(problem, group, CPU))
    _, sketches = run_case(case, Clock(CPU, 1))
    out, _, *grads = dense_attention(*(x.detach() for x in case.shards))
    return case, sketches, [out, *grads]


def test_the_results_are_those_of_dense_attention(
    one_process: tuple[Case, Sketches, list[Tensor]],
) -> None:
    case, sketches, dense = one_process
    assert largest_difference("dense", case.sketches(dense), sketches, 1e-5) < 1e-5


@pytest.mark.parametrize("wrong", range(4), ids=RESULTS)
@pytest.mark.parametrize("fault", ["swapped tokens", "one token", "swapped heads", "nan"])
def test_a_wrong_result_stops_the_run(
    wrong: int, fault: str, one_process: tuple[Case, Sketches, list[Tensor]]
) -> None:
    case, sketches, dense = one_process
    results = [x.clone() for x in dense]
    x = results[wrong]
    if fault == "swapped tokens":
        results[wrong] = torch.cat([x[:, 48:], x[:, :48]], 1)
    elif fault == "one token":
        x[:, 60] *= 1.5
    elif fault == "swapped heads":
        results[wrong] = x.flip(2)
    else:
        x[0, 5, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=f"some_plan: {RESULTS[wrong]} differs"):
        largest_difference("some_plan", case.sketches(results), sketches, 1e-2)


def test_plan_names() -> None:
    assert make_config("ulysses", 4, 2) == LongContextConfig(ulysses_degree=4)
    assert make_config("ulysses2", 4, 2) == LongContextConfig(ulysses_degree=2, ring_degree=2)
    burst = LongContextConfig(ring_degree=4, plan="zigzag", backward_plan="burst")
    assert make_config("burst", 4, 2) == burst
    assert make_config("double_ring", 4, 2).ranks_per_node == 2
    with pytest.raises(ValueError, match="Start an even number of processes"):
        make_config("ulysses2", 3, 2)
