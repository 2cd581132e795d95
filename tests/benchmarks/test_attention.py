"""attention.py: its candidates, its problems, and the shares of the ideal that it reports."""

import sys
from pathlib import Path
from typing import Any

import attention as attention_benchmark
import attention_job
import launch
import launches
import problems
import pytest
import torch
from operators import Job
from report import read_lines

from longctx_patch import Workload, compare
from longctx_patch.planner.machines import MACHINES
from tests.harness import run_distributed

CPU = torch.device("cpu")


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


def run_of_two(_: int, settings: str, folder: str) -> None:
    """A launch's process, in a group that is there already."""
    sys.path.append(folder)
    sys.argv = ["attention_job.py", settings]
    attention_job.start = lambda: CPU
    attention_job.finish = lambda: None
    attention_job.main()


def test_attention_checks_candidates_before_it_times_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fakes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(FAKE_PEER)

    def without_launcher(_: Path, arguments: list[str], num: int, *__: object) -> launch.Ending:
        run_distributed(run_of_two, num, arguments[0], str(tmp_path))
        return launch.Ending(1.0, None)

    monkeypatch.setattr(launches, "run_job", without_launcher)
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


def test_shares_of_the_ideal() -> None:
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
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
    rows: list[dict[str, Any]] = [
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


def test_ours_stand_beside_what_was_predicted() -> None:
    problem = problems.Problem(num_tokens=65536, num_heads=32, num_kv_heads=8, head_dim=128)
    ours = {"peer": "ours", "candidate": "ring=4,plan=zigzag", "problem": str(problem)}
    rows = [ours | {"status": "ok"}, ours | {"status": "wrong"}, {"peer": "alst", "status": "ok"}]
    (mine, *others) = attention_benchmark.with_predictions(rows, [problem], {"device": "X H200"})
    found = [
        row.prediction for row in compare(Workload(num_tokens=65536), MACHINES["h200"], 4).rows
    ]
    directions = [p.makespan_s for p in found if (p.plan, p.ulysses_degree) == ("zigzag", 1)]
    assert len(directions) == 2
    assert mine["predicted_s"] == pytest.approx(sum(directions))
    assert others == rows[1:]
    assert attention_benchmark.with_predictions(rows, [problem], {"device": "cpu"}) == rows


def test_a_problem_counts_what_the_mask_allows() -> None:
    shape: dict[str, Any] = {"num_tokens": 40, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    for more in ({}, {"window": 7}, {"lengths": (3, 20, 17)}):
        problem = problems.Problem(**shape, **more)
        assert problems._allowed(problem, CPU).sum() == problem.area
    lengths = problems.lognormal_lengths(1000, 64)
    assert sum(lengths) == 1000
    assert len(set(lengths)) > 10


def test_a_kernel_that_is_not_here_has_no_ideal() -> None:
    problem = problems.Problem(num_tokens=64, num_heads=4, num_kv_heads=2, head_dim=8)
    job = Job(torch.device("cpu"), 0, 1)
    for kernel in ("cudnn", "nonsense"):
        assert attention_job.ideal_turn(kernel, problem, job) is None
        assert attention_job.plain_results(kernel, problem, job.device) is None
    assert attention_job.ideal_turn("torch_cpu", problem, job) is not None
