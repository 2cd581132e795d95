"""calibrate.py over two processes on the CPU, and its fits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.calibrate import KernelCall, fit_kernel, fit_line, kernel_calls
from tests.benchmarks.scripts import run_script

CPU = torch.device("cpu")


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
