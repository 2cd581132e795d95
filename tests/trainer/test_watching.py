"""Ranks that disagree, replicas that diverge, and the watchdog's marks, under a trainer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from longctx_patch import TimeLimits, Watchdog
from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.health import pace
from longctx_patch.health.replicas import EVERY, ReplicasDivergedError
from longctx_patch.recipes.callbacks import MetricsCallback
from longctx_patch.recipes.metrics import read_metrics
from longctx_patch.trainer import watching
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, make_trainer


class Perturbs(TrainerCallback):
    """Changes one weight on rank 1 in step 4."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                given["model"].model.norm.weight[0] += 1e-3


class Marks(TrainerCallback):
    """Notes what the watchdog thinks the trainer does at the end of each step and evaluation."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.found: list[str] = []
        self._watchdog = watchdog

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(str(self._watchdog._progress.at))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(str(self._watchdog._progress.at))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(str(self._watchdog._progress.at))


def slow_on_rank_1() -> Callable[[], float]:
    return lambda: 137e12 if dist.get_rank() == 1 else 700e12


def odd_trainers(folder: str) -> tuple[list[str], list[tuple[str, int]], list[str]]:
    """What trainers say of rank 1's arguments; the errors of replicas that diverge and their steps,
    in a run that saves and in one that doesn't; the watchdog's marks."""
    said = []
    two = {"ring_degree": 2}
    odd = {"learning_rate": (0.02, 0.03), "max_steps": (3, 4), "save_in_background": (True, False)}
    for name, values in odd.items():
        given = {name: values[int(os.environ["RANK"])]}
        ours = given if name == "save_in_background" else {}
        case = Case("odd", config=two, arguments={} if ours else given)
        trainer = make_trainer(case, Path(folder) / name, is_patched=True, **ours)
        os.environ["PARALLELISM_CONFIG_CP_SIZE"] = ("1", "2")[int(os.environ["RANK"])]
        with pytest.raises(ValueError, match="disagree") as caught:
            trainer.train()
        said.append(str(caught.value))
        del os.environ["PARALLELISM_CONFIG_CP_SIZE"]
        trainer.unpatch()
    os.environ["ACCELERATE_MIXED_PRECISION"] = ("no", "bf16")[int(os.environ["RANK"])]
    with pytest.raises(ValueError, match="mixed_precision is no, bf16 on ranks 0 to 1"):
        make_trainer(Case("odd", config=two), Path(folder) / "odd", is_patched=True)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    diverged = []
    for name, saving in {
        "drifts": {},
        "saved": {"save_strategy": "steps", "save_steps": 3},
    }.items():
        arguments = {"max_steps": 30, "max_grad_norm": 0.0, **saving}
        case = Case(name, config=two, arguments=arguments)
        trainer = make_trainer(case, Path(folder) / name, is_patched=True)
        trainer.add_callback(Perturbs())
        with pytest.raises(ReplicasDivergedError) as odd_weights:
            trainer.train()
        diverged.append((str(odd_weights.value), trainer.state.global_step))
        trainer.unpatch()
    with Watchdog(TimeLimits()) as watchdog:
        arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        arguments |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
        case = Case("marked", config=two, arguments=arguments)
        trainer = make_trainer(case, Path(folder) / "marked", is_patched=True, watchdog=watchdog)
        marks = Marks(watchdog)
        trainer.add_callback(marks)
        trainer.add_callback(MetricsCallback(2))
        with patch.object(pace, "probe_of", lambda device: slow_on_rank_1):
            trainer.train()
    return said, diverged, marks.found


def test_each_training_of_one_trainer_compares_the_ranks_anew(tmp_path: Path) -> None:
    case = Case("pace", arguments={"max_steps": 1})
    trainer = make_trainer(case, tmp_path, is_patched=True)
    with patch.object(watching, "PaceCheck", wraps=pace.PaceCheck) as made:
        trainer.train()
        trainer.train()
    assert made.call_count == 2


def test_ranks_that_disagree_or_diverge_under_a_trainer(tmp_path: Path) -> None:
    both = run_launched(odd_trainers, 2, str(tmp_path))
    assert both[0] == both[1]
    (rate, steps, saving), [(diverged, step), (unsaved, at)], marks = both[0]
    assert "arguments.learning_rate: 0.02 on rank 0, 0.03 on rank 1" in rate
    assert "arguments.max_steps: 3 on rank 0, 4 on rank 1" in steps
    assert "arguments of the mixin.save_in_background: True on rank 0, False on rank 1" in saving
    assert "launch file: PARALLELISM_CONFIG_CP_SIZE: '1' on rank 0, '2' on rank 1" in rate
    assert "weights of rank 1 are not those of rank 0 any more" in diverged
    assert step == EVERY + 1
    assert "after step 6 the trained weights of rank 1" in unsaved
    assert "All of them were alike after step 3, and nothing has been saved since" in unsaved
    assert at == 6
    saved = checkpoints_of(tmp_path / "saved")
    assert [each.step for each in saved.complete()] == [3]
    assert not saved.path_of(6).exists()
    evaluation = "an evaluation after step 2"
    (slow,) = (line for line in read_metrics(tmp_path / "marked") if "slow_ranks" in line)
    assert slow["step"] == 1
    assert "SLOW GPU: all ranks wait in every step for rank 1 on " in slow["slow_ranks"]
    assert marks == ["step 2", "step 2", "step 3", evaluation, "step 3"]
