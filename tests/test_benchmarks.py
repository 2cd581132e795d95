"""The benchmark scripts, tiny and on CPU: they run, and their figures are what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Python puts a script's folder on the path, where the scripts find measure.py.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from measure import Clock

from benchmarks.calibrate import KernelCall, fit_kernel, fit_line, kernel_calls
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
from tests.harness import free_port
from tests.reference import dense_attention

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def run_script(name: str, num_processes: int, out: Path, *arguments: str) -> tuple[Any, str]:
    """(the JSON it wrote, what rank 0 printed), with the environment that torchrun gives."""
    job = {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--out", str(out), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * num_processes, outputs
    return json.loads(out.read_text()), outputs[0][0] + outputs[0][1]


def test_calibrate_over_two_processes(tmp_path: Path) -> None:
    arguments = ("--quick", "--sizes", "32", "64", "--iterations", "3")
    report, printed = run_script("calibrate.py", 2, tmp_path / "rates.json", *arguments)
    assert len(report["kernels"]) == 2 * len(kernel_calls([32, 64]))
    for row in report["kernels"]:
        pairs = row["rows"] * (row["rows"] + 1) / 2 if row["causal"] else row["rows"] * row["keys"]
        products = 2 if row["direction"] == "forward" else 5
        assert row["flops"] == 2 * products * pairs * row["heads"] * 128
        assert 0 < row["p20_s"] <= row["seconds"] <= row["p80_s"]
    kinds = {(fit["direction"], fit["causal"]) for fit in report["kernel_fits"]}
    assert kinds == {(d, causal) for d in ("forward", "backward") for causal in (True, False)}
    for fit in report["kernel_fits"]:
        assert min(fit["fixed_s"], fit["peak_flops"]) > 0 <= fit["half_tokens"]
    for fit in (*report["memory_fits"], *report["link_fits"]):
        assert min(fit["latency_s"], fit["bandwidth"]) > 0
    merges = [row["bytes"] for row in report["memory"] if row["kind"] == "softmax_merge"]
    assert merges == [rows * 32 * 128 * (4 + 4 + 4) for rows in (32, 64)]  # float32 on CPU
    assert {(row["kind"], row["bytes"]) for row in report["links"]} == {
        (kind, size // (1 if kind == "ring_hop" else 2))  # half of an all-to-all is one's own
        for kind in ("ring_hop", "all_to_all", "to_all_others")
        for size in (2**16, 2**18, 2**20)
    }
    overlap = report["overlap"]
    beside = overlap["both_s"] - overlap["kernel_s"]
    shorter = min(overlap["kernel_s"], overlap["hop_s"])
    assert overlap["overlap_slowdown"] == pytest.approx(beside / shorter)
    assert {"forward", "backward", "exchange"} <= report["host"].keys()
    assert report["machine"]["num_processes"] == 2
    assert "kernel_fits" in printed
    assert "peak_flops" in printed


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


def test_a_fit_finds_what_made_the_times() -> None:
    calls = [call for call in kernel_calls([1024, 4096, 16384]) if not call.causal]
    flops = np.array([call.flops("forward") for call in calls], dtype=np.float64)
    keys = np.array([call.keys for call in calls], dtype=np.float64)
    fit = fit_kernel(flops, keys, 1e-5 + flops / 6e14 * (1 + 400 / keys))
    assert fit["fixed_s"] == pytest.approx(1e-5, rel=0.02)
    assert fit["peak_flops"] == pytest.approx(6e14, rel=0.02)
    assert fit["half_tokens"] == pytest.approx(400, rel=0.05)
    assert fit["largest_error"] < 5e-3


def test_a_line_stays_positive() -> None:
    amounts = np.array([1.0, 2.0, 3.0])
    line = fit_line(amounts, amounts * 2e-3 - 1e-3)  # the best line starts at -1 ms
    assert 0 < line.fixed_s < 1e-6
    assert 300 < line.per_s < 1500
    assert line.largest_error > 0.1


def test_flops_of_a_causal_square() -> None:
    call = KernelCall(3, 3, True, 2, 1)
    assert (call.flops("forward"), call.flops("backward")) == (4 * 6 * 2 * 128, 10 * 6 * 2 * 128)


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
