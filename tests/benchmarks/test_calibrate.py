"""calibrate.py over two processes on the CPU, and the lines that it fits."""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import calibrate
import numpy as np
import pytest
import torch
from calibrate import fit, fit_kernel, kernel_calls

from tests.harness import run_distributed


def run_of_two(rank: int, options: str, log: str) -> None:
    """A process of the script, in a group that is there already."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    calibrate.start = lambda: torch.device("cpu")
    calibrate.finish = lambda: None
    sys.argv = ["calibrate.py", *options.split()]
    with Path(f"{log}{rank}").open("w") as said, redirect_stdout(said):
        calibrate.main()


def test_calibrate_over_two_processes(tmp_path: Path) -> None:
    out, log = tmp_path / "rates.json", tmp_path / "log"
    run_distributed(run_of_two, 2, f"--out {out} --quick --sizes 32 64 --iterations 3", str(log))
    report, printed = json.loads(out.read_text()), (tmp_path / "log0").read_text()
    measured = report["measured"]
    assert len(measured["kernels"]) == 2 * len(kernel_calls([32, 64], 128))
    for row in measured["kernels"]:
        pairs = row["rows"] * (row["rows"] + 1) / 2 if row["causal"] else row["rows"] * row["keys"]
        products = 2 if row["direction"] == "forward" else 5
        assert row["flops"] == 2 * products * pairs * row["heads"] * 128
        assert 0 < row["p20_s"] <= row["seconds"] <= row["p80_s"]
    ways = {f"{way}_{kind}" for way in ("forward", "backward") for kind in ("causal", "full")}
    assert report["kernels"].keys() == ways
    for rate in (*report["kernels"].values(), *report["memory"].values()):
        assert min(rate.values()) >= 0
    merges = [row["bytes"] for row in measured["memory"] if row["kind"] == "softmax_merge"]
    assert merges == [rows * 32 * 128 * (4 + 4 + 4) for rows in (32, 64)]  # float32 on CPU
    assert [row["bytes"] for row in measured["links"]] == [2**16, 2**18, 2**20]
    overlap = report["overlap"]
    beside = overlap["both_s"] - overlap["kernel_s"]
    shorter = min(overlap["kernel_s"], overlap["hop_s"])
    assert overlap["overlap_slowdown"] == pytest.approx(beside / shorter)
    assert {"forward", "backward", "exchange"} <= report["host_s"].keys()
    assert report["machine"]["num_processes"] == 2
    assert "peak_flops" in printed


def test_a_fit_finds_what_made_the_times() -> None:
    calls = [call for call in kernel_calls([1024, 4096, 16384], 128) if not call.causal]
    flops = np.array([call.flops("forward") for call in calls], dtype=np.float64)
    keys = np.array([call.keys for call in calls], dtype=np.float64)
    found = fit_kernel(flops, keys, 1e-5 + flops / 6e14 * (1 + 400 / keys))
    assert found["fixed_s"] == pytest.approx(1e-5)
    assert found["peak_flops"] == pytest.approx(6e14)
    assert found["half_tokens"] == pytest.approx(400)
    assert found["largest_error"] < 1e-6


def test_no_slope_is_negative() -> None:
    amounts = np.array([1.0, 2.0, 3.0])
    seconds = amounts * 2e-3 - 1e-3  # the best line starts at -1 ms
    slopes, error = fit({"call": np.ones(3), "bytes": amounts}, seconds)
    assert slopes["call"] == 0
    assert 300 < 1 / slopes["bytes"] < 1500
    assert error > 0.1
