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

import attention as attention_benchmark
import launch
import problems
import step
import step_job
import step_profile
from config_text import config_of, name_of, options_of
from measure import Clock
from operators.flash_attn_2_over_torch import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from report import Bars, plot, read_lines
from step_profile import Activity
from systems import Job, Shape
from systems.ours import Ours

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
from tests.harness import free_port, run_distributed
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


FAKE_PEER = """
from dataclasses import replace
from operators import ours

def candidates(job):
    right, = ours.candidates(job)

    def slightly_wrong(problem):
        prepared = right.prepare(problem)
        return replace(prepared, run=lambda q, k, v: prepared.run(q, k, v) * 1.01)

    def broken(problem):
        raise RuntimeError("this peer doesn't work")

    return [
        replace(right, name="right"),
        replace(right, name="wrong", prepare=slightly_wrong),
        replace(right, name="broken", prepare=broken),
    ]
"""


def test_attention_checks_candidates_before_it_times_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fakes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(FAKE_PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = "--tokens 64 --heads 4/2 --head-dim 8 --documents 3 --window 9 --check-tokens 48"
    options = "--gpus 2 --iterations 2 --limit-s 60 --configs ulysses=2 --ideal-kernels torch_cpu"
    options += " --peers ideal fakes.attention"
    attention_benchmark.main(["--out", str(tmp_path), *sizes.split(), *options.split()])

    rows = read_lines(tmp_path / "attention.jsonl")
    assert [row["status"] for row in rows[:3]] == ["ok"] * 3
    rows = rows[3:]
    masks = ["causal", "packed", "window"]
    expected = [(name, mask) for name in ("right", "wrong", "broken") for mask in masks]
    assert [(row["candidate"], row["mask"]) for row in rows] == expected
    for row in rows:
        assert row["machine"]["torch"] == torch.__version__
        assert row["area"] <= 64 * 65 // 2
        if row["candidate"] == "right":
            assert 0 < row["p20_s"] <= row["seconds"] <= row["p80_s"]
            assert row["forward_s"] > 0 < row["tflops_per_s_per_gpu"]
            assert all(x["whole"] < 1e-5 for x in row["differences"].values())
            assert row["status"] == "ok"
            assert row["ideal_s"] == pytest.approx(
                row["ideal_beside_s"] * problems.share_of(_problem_of(row), 2)
            )
            assert row["share_of_ideal"] == pytest.approx(row["ideal_s"] / row["seconds"])
            assert 0.3 < row["error_over_plain"] < 3
        else:
            assert "seconds" not in row
    wrong, broken = rows[3], rows[6]
    assert wrong["status"] == "wrong"
    assert wrong["differences"]["out"]["whole"] == pytest.approx(0.01, rel=1e-3)
    assert "out is off by 0.01" in wrong["reason"]
    assert (broken["status"], broken["reason"]) == (
        "failed",
        "RuntimeError: this peer doesn't work",
    )
    report = (tmp_path / "attention.md").read_text()
    assert "64 tokens, 4/2 heads of 8, window 9" in report
    assert "this peer doesn't work" in report


def _problem_of(row: dict[str, Any]) -> problems.Problem:
    names = ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "window")
    lengths = row["lengths"] and tuple(row["lengths"])
    return problems.Problem(**{name: row[name] for name in names}, lengths=lengths)


def test_a_plot_leaves_empty_panels_out(tmp_path: Path) -> None:
    assert not plot([Bars("nothing", "%", {})], tmp_path / "a.png", "title")
    assert plot([Bars("some", "%", {"a": 1.0}), Bars("none", "%", {})], tmp_path / "b.png", "title")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b.png"]


def test_shares_of_the_ideal() -> None:
    shape = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
    causal = problems.Problem(num_tokens=1024, **shape)
    window = problems.Problem(num_tokens=1024, window=128, **shape)
    assert problems.ideal_row(causal, 4) == problems.Problem(
        num_tokens=1024, num_heads=2, num_kv_heads=1, head_dim=16
    )
    assert window.area == 128 * 129 // 2 + 896 * 128
    assert problems.share_of(causal, 4) == 1.0
    ideal = problems.ideal_row(window, 4)
    assert problems.share_of(window, 4) == pytest.approx(window.area / ideal.area)
    timed = {"status": "ok", "p20_s": 1.0, "p80_s": 1.0, "forward_s": 1.0}
    rows = [
        {"peer": "ideal", "candidate": "a", "kernel": "a", "problem": 0, "seconds": 2.0, **timed},
        {"peer": "ideal", "candidate": "b", "kernel": "b", "problem": 0, "seconds": 1.0, **timed},
        {"peer": "x", "candidate": "of a", "kernel": "a", "problem": 0, "seconds": 2.5, **timed},
        {"peer": "x", "candidate": "", "status": "failed", "reason": "no memory"},
    ]
    assert attention_benchmark.fastest_ideals(rows, [causal, window]) == {0: "b"}
    with_ideals = attention_benchmark.with_ideals(rows, [causal, window], 4)
    found = with_ideals[2]
    assert found["share_of_ideal"] == pytest.approx(0.8)
    assert found["share_of_fastest_ideal"] == pytest.approx(0.4)
    assert found["tflops_per_s_per_gpu"] == pytest.approx(causal.flops / 4 / 2.5 * 1e-12)
    assert with_ideals[3] == rows[3]


def test_a_problem_counts_what_the_mask_allows() -> None:
    shape = {"num_tokens": 40, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    for more in ({}, {"window": 7}, {"lengths": (3, 20, 17)}):
        problem = problems.Problem(**shape, **more)
        assert problems._allowed(problem, CPU).sum() == problem.area
    lengths = problems.lognormal_lengths(1000, 64)
    assert sum(lengths) == 1000
    assert len(set(lengths)) > 10


def test_flash_attention_2_over_torch() -> None:
    """Dense and packed, with more keys than queries: the last query ends at the last key."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 6, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 10, 2, 8, dtype=torch.float64)
    rule = (0.0, 8**-0.5, True)
    out, lse, *_ = _flash_attn_forward(q, k, v, *rule)
    before = torch.zeros(1, 4, 4, 8, dtype=torch.float64)
    whole_q, whole_dout = torch.cat([before, q], 1), torch.cat([before, dout], 1)
    dense_out, dense_lse, *dense_grads = dense_attention(whole_q, k, v, whole_dout)
    torch.testing.assert_close(out, dense_out[:, 4:])
    torch.testing.assert_close(lse, dense_lse[:, :, 4:])
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *grads, *rule)
    for grad, dense in zip(grads, (dense_grads[0][:, 4:], *dense_grads[1:]), strict=True):
        torch.testing.assert_close(grad, dense)

    edges = (torch.tensor([0, 2, 6]), torch.tensor([0, 5, 10]))
    packed, lse, *_ = _flash_attn_varlen_forward(q[0], k[0], v[0], *edges, 4, 5, *rule)
    parts = [
        _flash_attn_forward(q[:, a:b], k[:, c:d], v[:, c:d], *rule)[0][0]
        for a, b, c, d in ((0, 2, 0, 5), (2, 6, 5, 10))
    ]
    torch.testing.assert_close(packed, torch.cat(parts))
    given = [torch.empty_like(x[0]) for x in (q, k, v)]
    tensors = (dout[0], q[0], k[0], v[0], packed, lse)
    _flash_attn_varlen_backward(*tensors, *given, *edges, 4, 5, *rule)
    first = [torch.empty_like(x) for x in (q[:, :2], k[:, :5], v[:, :5])]
    block = (dout[:, :2], q[:, :2], k[:, :5], v[:, :5], packed[None, :2], lse[None, :, :2])
    _flash_attn_backward(*block, *first, *rule)
    for grad, part in zip(given, first, strict=True):
        torch.testing.assert_close(grad[: part.shape[1]], part[0])


def test_options_on_the_command_line() -> None:
    text = "ulysses=2,ring=2,checkpoint=none,deterministic=true"
    assert options_of(text)["deterministic"] is True
    assert config_of(text) == LongContextConfig(
        ulysses_degree=2, ring_degree=2, checkpoint="none", deterministic=True
    )
    assert config_of(name_of({"ulysses_degree": 4, "plan": "auto"})).ulysses_degree == 4
    with pytest.raises(ValueError, match="'ulysses' has no value"):
        options_of("ulysses")
    with pytest.raises(ValueError, match="Name fields of LongContextConfig"):
        config_of("ulises=4")


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_default_systems_of_ours_have_options_that_exist(num_gpus: int) -> None:
    ours = [name for name in step.default_systems(num_gpus) if name.startswith("ours:")]
    layers = []
    for name in ours:
        options = options_of(name.removeprefix("ours:"))
        layers.append(options.pop("layers", "none"))
        assert config_of(name_of(options)).sequence_degree == num_gpus
    assert {*layers} == {"none", "liger", "compile"}


def test_a_job_that_hangs_or_fails_ends_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'hang': time.sleep(60)\n"
        "if os.environ['RANK'] == '1': raise ValueError('of rank 1')\n"
        "if sys.argv[1] == 'wait': time.sleep(60)\n"
    )
    hung = launch.run_job(script, ["hang"], 2, 0.5, tmp_path / "hung")
    assert hung.problem == "ended at its time limit of 0.5 s; rank 0 said last: nothing"
    failed = launch.run_job(script, ["fail"], 2, 30.0, tmp_path / "failed")
    assert failed.problem == "rank 1 ended with 1: ValueError: of rank 1"
    assert failed.seconds < launch.GRACE_S
    late = launch.run_job(script, ["fail"], 2, launch.Budget(0.0).limit_s(30.0), tmp_path / "late")
    assert "--budget-s" in (late.problem or "")


TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 61,
}


def run_step_of_two(rank: int, settings: dict[str, Any]) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group is there already
    Ours.close = lambda self: None  # type: ignore[method-assign]  # the harness ends the group
    run_step(rank, 2, settings)


def run_step(rank: int, num_ranks: int, settings: dict[str, Any]) -> None:
    step_job.run(Job(CPU, rank, num_ranks, Shape(**TINY)), settings)


def step_settings(system: str, lines: Path, expected: dict[str, float]) -> dict[str, Any]:
    return {
        "system": system,
        "tokens": [32, 48],
        "check_tokens": 24,
        "steps": 2,
        "profile": False,
        "expected_losses": expected,
        "lines": str(lines),
    }


def test_a_step_of_ours_over_two_processes(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    settings = step_settings("ours:ulysses=2,checkpoint=attention", lines, {"48": 9.0})
    run_distributed(run_step_of_two, 2, settings)
    timed, wrong = read_lines(lines)
    assert (timed["status"], timed["num_tokens"]) == ("ok", 32)
    assert 0 < timed["p20_s"] <= timed["seconds"] <= timed["p80_s"]
    assert timed["tokens_per_s_per_gpu"] == pytest.approx(16 / timed["seconds"])
    flops = 6 * Shape(**TINY).linear_weights * 32 + 6 * 2 * 32 * 32 * 32
    speed = timed["model_tflops_per_s_per_gpu"]
    assert speed == pytest.approx(flops / 2 / timed["seconds"] * 1e-12)
    assert len(timed["losses"]) == 2 + 2
    assert max(timed["check"]["differences"].values()) < 1e-4
    assert len(timed["check"]["differences"]) == 1 + 2 * 2
    # A loss that is not the one that the others have is reported, and no time.
    assert (wrong["status"], wrong["num_tokens"]) == ("wrong", 48)
    assert "seconds" not in wrong
    assert "ours 9" in wrong["reason"]


FAKE_SYSTEM = """
from systems import stock

def build(job, model, options):
    system = stock.build(job, model, {})
    backward = system.backward
    system.backward = lambda loss: backward(loss * options["scale"])
    return system
"""


def test_step_reports_wrong_gradients_and_times_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fake_systems"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scaled.py").write_text(FAKE_SYSTEM)
    monkeypatch.syspath_prepend(str(tmp_path))

    def in_this_process(script: Path, arguments: list[str], *_: object) -> launch.Ending:
        run_step(0, 1, json.loads(Path(arguments[0]).read_text()))
        return launch.Ending(1.0, None)

    monkeypatch.setattr(step, "run_job", in_this_process)
    systems = ["fake_systems.scaled:scale=2", "fake_systems.scaled:scale=1", "accelerate_cp"]
    options = "--gpus 1 --tokens 32 --check-tokens 24 --steps 2 --no-floor --systems"
    step.main(["--out", str(tmp_path), *options.split(), *systems])
    wrong, right, not_covered = read_lines(tmp_path / "step.jsonl")
    assert wrong["status"] == "wrong"
    assert "v_proj.weight of 24 tokens" in wrong["reason"]
    assert "off by 1, allowed" in wrong["reason"]
    assert "seconds" not in wrong
    assert right["status"] == "ok"
    assert right["speedup_over_best_peer"] == 1.0
    assert not_covered["status"] == "not covered"
    assert "off by 1, allowed" in (tmp_path / "step.md").read_text()


def test_floor_and_flops_of_the_llama_shape() -> None:
    """Figures that a step at 131,072 tokens of four H200 was held against."""
    shape = Shape()
    assert shape.linear_weights == 8 * 218_103_808 + 128256 * 4096
    assert shape.step_flops(131072) / 2.56 / 4 * 1e-12 == pytest.approx(505, rel=0.01)


PARTS_OF_KERNELS = {
    "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention forward",
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention backward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention backward",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90": (
        "attention forward"
    ),
    "kernel_cutlass_flash_bwd_preprocessFlashAttentionBackwardPreprocess": "attention backward",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "linear",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "linear",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "linear",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d": "loss",
    "void cunn_SoftMaxForward<8, c10::BFloat16, float>": "loss",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exposed communication",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "FSDP",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "FSDP",
    "void at::native::chunk_cat_cuda_kernel<float>": "FSDP",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "Memcpy DtoD (Device -> Device)": "elementwise",
    "Memcpy PtoP (Device -> Device)": "exposed communication",
}


@pytest.mark.parametrize(("kernel", "part"), PARTS_OF_KERNELS.items())
def test_part_of_a_kernel(kernel: str, part: str) -> None:
    assert step_profile.part_of(Activity(kernel, 0.0, 1.0)) == part


def test_ranges_say_what_names_do_not() -> None:
    gemm, send = "nvjet_tst", "ncclDevKernel_SendRecv"
    assert step_profile.part_of(Activity(gemm, 0, 1, ("loss",))) == "loss"
    assert step_profile.part_of(Activity(gemm, 0, 1, ("lossless thing",))) == "linear"
    assert step_profile.part_of(Activity("add", 0, 1, ("Optimizer.step#AdamW.step",))) == (
        "optimizer"
    )
    assert step_profile.part_of(Activity(send, 0, 1, ("FSDP::all_gather",))) == "FSDP"
    assert step_profile.part_of(Activity("copy", 0, 1, ("FSDP::all_gather_copy_in",))) == "FSDP"


def test_every_instant_of_a_step_has_one_part() -> None:
    """Communication counts where nothing computes; what is outside the step doesn't."""
    activities = [
        Activity("flash_fwd", -5, 10),  # begins before the step
        Activity("ncclDevKernel_SendRecv", 5, 30),  # 10 hidden, 5 under the matmul: 10 exposed
        Activity("nvjet", 20, 25),
        Activity("ncclDevKernel_AllGather", 28, 34),  # FSDP is named first: 28 to 34
        Activity("flash_bwd", 40, 60),
        Activity("vectorized_elementwise", 50, 65),  # 60 to 65 alone
        Activity("cross_entropy", 90, 120),  # ends after the step
    ]
    parts = step_profile.microseconds_by_part(activities, 0, 100)
    assert {part: value for part, value in parts.items() if value} == {
        "attention forward": 10,
        "exposed communication": 10 + 3,
        "linear": 5,
        "FSDP": 6,
        "attention backward": 20,
        "elementwise": 5,
        "loss": 10,
        "idle": 6 + 25,
    }
    assert sum(parts.values()) == 100
    waits = step_profile.waits_of(activities, 0, 100)
    assert [(w.start_us, w.duration_us, w.before) for w in waits] == [
        (10, 10, "nvjet"),
        (25, 9, "nothing yet"),
    ]
    assert waits[1].waits_for == "ncclDevKernel_AllGather"
    at_the_end = [Activity("gemm", 0, 10), Activity("ncclA", 12, 14), Activity("ncclB", 50, 120)]
    waits = step_profile.waits_of(at_the_end, 0, 100)
    assert [(w.start_us, w.duration_us) for w in waits] == [(50, 50), (12, 2)]


def test_a_named_range_leaves_no_trace_on_a_module() -> None:
    layer = torch.nn.Linear(2, 2)
    bound = vars(layer)["forward"] = lambda x: x + 1
    with step_profile.named(layer, "loss"):
        assert layer(1) == 2
        assert not layer._forward_hooks, "a head with hooks makes full logits"
    assert vars(layer)["forward"] is bound
    del vars(layer)["forward"]
    with step_profile.named(layer, "loss"):
        assert layer(torch.ones(1, 2)).shape == (1, 2)
    assert "forward" not in vars(layer)


def test_a_trace_of_the_profiler() -> None:
    def event(name: str, category: str, start: float, duration: float, stream: int) -> Any:
        place = {"pid": 0, "tid": stream, "ts": start, "dur": duration}
        return {"ph": "X", "name": name, "cat": category, **place}

    trace = {
        "traceEvents": [
            event("gemm", "kernel", 12, 3, 7),
            event("loss", "gpu_user_annotation", 10, 6, 7),
            event("after", "kernel", 17, 1, 7),
            event("elsewhere", "kernel", 12, 3, 8),
            event("aten::mm", "cpu_op", 1, 2, 99),
            event(step_profile.STEP, "user_annotation", 2, 20, 99),
            event(step_profile.STEP, "gpu_user_annotation", 3, 18, 7),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found, start, stop = step_profile.activities_of(trace)
    assert (start, stop) == (2, 22)
    assert {activity.name: activity.ranges for activity in found} == {
        "gemm": (step_profile.STEP, "loss"),
        "after": (step_profile.STEP,),
        "elsewhere": (),
    }
