"""scaling.py: launches of several sizes, beside predictions."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import launch
import launches
import pytest
import scaling
import step_job
import torch
from model_shapes import sizes_of
from report import read_lines
from systems import Job
from systems.ours import Ours

from tests.harness import run_distributed

TINY = ["--model", "tiny", "--num-layers", "2", "--steps", "2", "--check-tokens", "24"]


@pytest.mark.parametrize(
    ("num_gpus", "num_kv_heads", "wanted"),
    [(1, 8, (1, 1)), (8, 8, (8, 1)), (8, 4, (4, 2)), (6, 4, (2, 3)), (4, 3, (1, 4))],
)
def test_degrees_divide_heads_and_gpus(num_gpus: int, num_kv_heads: int, wanted: Any) -> None:
    ulysses, ring = wanted
    assert scaling.degrees(num_gpus, num_kv_heads) == f"ulysses={ulysses},ring={ring}"


def test_gpus_that_are_not_there_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = scaling.parse_arguments(["--out", "x", *TINY])
    arguments.available = 2
    assert scaling.launches_of(arguments) == [
        "1 ours:ulysses=1,ring=1,checkpoint=auto",
        "2 ours:ulysses=2,ring=1,checkpoint=auto",
    ]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{n} GPUs: this machine has 2. Left out." for n in (4, 8)]


def test_launches_are_reported_with_shares_and_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(script: Path, arguments: list[str], *_: object) -> launch.Ending:
        settings = json.loads(Path(arguments[0]).read_text())
        step_job.run(Job(torch.device("cpu"), 0, 1, sizes_of(settings)), settings)
        return launch.Ending(1.0, None)

    monkeypatch.setattr(launches, "run_job", in_this_process)
    named = scaling.parse_arguments
    monkeypatch.setattr(
        scaling,
        "parse_arguments",
        lambda words: Namespace(**vars(named(words)) | {"device_name": "NVIDIA H200"}),
    )
    words = ["--out", str(tmp_path), "--gpus", "1", "--tokens-per-gpu", "32", "--tokens", "48"]
    scaling.main([*words, *TINY])
    short, long = read_lines(tmp_path / "scaling.jsonl")
    assert (short["num_tokens"], long["num_tokens"]) == (32, 48)
    assert short["share_of_one"] == 1
    rate = "model_tflops_per_s_per_gpu"
    assert long["share_of_one"] == pytest.approx(long[rate] / short[rate])
    assert 0 < short["predicted_s"] < long["predicted_s"]
    assert 0 < short["predicted_gib"] < long["predicted_gib"]
    assert (
        "| 1 | 48 | ours:ulysses=1,ring=1,checkpoint=auto |"
        in (tmp_path / "scaling.md").read_text()
    )


def run_replicas(rank: int, lines: str) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group exists already
    Ours.close = lambda self: None  # type: ignore[method-assign]  # the harness ends the group
    settings = {
        "model": "tiny",
        "num_layers": 2,
        "system": "ours:replicas=2,checkpoint=none",
        "tokens": [32],
        "check_tokens": 24,
        "steps": 2,
        "profile": False,
        "expected_losses": {},
        "lines": lines,
    }
    step_job.run(Job(torch.device("cpu"), rank, 2, sizes_of(settings)), settings)


def test_replicas_train_a_row_each_and_are_compared_with_one_process(tmp_path: Path) -> None:
    run_distributed(run_replicas, 2, str(tmp_path / "lines"))
    (row,) = read_lines(tmp_path / "lines")
    assert row["status"] == "ok"
    assert row["tokens_per_s_per_gpu"] == pytest.approx(32 / row["seconds"])
    assert max(row["check"]["differences"].values()) < 1e-4
