"""trainers.py: first losses are compared with one process, and warm-up steps don't count."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
import trainers_job
from systems import Job
from systems.model import make_model, random_row

from longctx_patch.planner.model_shape import shape_of
from tests.hf.tiny import tiny_config


def test_a_first_loss_that_is_not_one_processes_is_wrong() -> None:
    row: dict[str, Any] = {"system": "sft", "status": "ok", "alone": 5.0, "first_loss": 5.01}
    assert trainers.checked(dict(row))["status"] == "ok"
    wrong = trainers.checked(row | {"first_loss": 2.5})
    assert (wrong["status"], wrong["reason"]) == (
        "wrong",
        "the first loss is 2.5000, one process has 5.0000",
    )
    assert trainers.checked(row | {"first_loss": float("nan")})["status"] == "wrong"
    assert trainers.checked(row | {"system": "dpo", "first_loss": math.log(2)})["status"] == "ok"


def test_only_steps_after_the_warm_up_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = trainers_job.StepClock(torch.device("cpu"), 3), [9.0] * 4 + [2.0, 3.0, 4.0]
    ends = iter([sum(seconds[: step + 1]) for step in range(len(seconds))])
    monkeypatch.setattr(trainers_job, "perf_counter", lambda: next(ends))
    for _ in seconds:
        clock.on_step_end()
    row = clock.row(600, 2)
    assert (row["seconds"], row["tokens_per_s_per_gpu"]) == (3.0, 100.0)


def test_loops_begin_with_the_loss_of_one_process(tmp_path: Path) -> None:
    config = tiny_config("llama")
    job = Job(torch.device("cpu"), 0, 1, shape_of(config, "tiny"))
    model = make_model(config, job.device, torch.float32)
    alone = trainers_job.loss_of_one_process(
        model, random_row(40, job.shape.vocab_size, job.device)
    )
    settings = {"tokens": 40, "rows": 2, "steps": 1, "checkpoint": "none"}
    settings |= {"prompt": 30, "share_prefixes": "always"}
    settings |= {"lines": str(tmp_path / "lines.jsonl")}
    model.requires_grad_(True)
    found = trainers_job.run_group(job, copy.deepcopy(model), settings)
    assert found["first_loss"] == pytest.approx(found["alone"], rel=1e-5)
    found = trainers_job.run_recipe(job, copy.deepcopy(model), settings)
    assert found["first_loss"] == pytest.approx(
        alone, rel=trainers.TOLERANCE
    )  # its last token differs
    found = trainers_job.run_loop(job, model, settings)
    assert found["first_loss"] == pytest.approx(alone, rel=1e-5)
