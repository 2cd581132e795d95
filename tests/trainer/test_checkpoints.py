"""Runs that save, resume and take the best model back, at one degree and at another."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.launched import run_launched
from tests.trainer.trained import (
    Case,
    Trained,
    complaints,
    empty,
    found_of,
    make_trainer,
    model_of,
    numbers,
    weights_of,
)

CASE = Case(
    "saved",
    config={"ring_degree": 2},
    arguments={
        "max_steps": -1,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
    },
    num_rows=21,  # neither the batches nor the steps of an epoch come out even
)
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


def run(folder: str, is_patched: bool, checkpoint: str | None = None) -> Trained:
    """Train to the end, from a checkpoint or from the start; from the start, take the model that
    was best, which by this metric is not the last one."""
    more = {} if checkpoint else BEST
    case = Case("", config=CASE.config, arguments=CASE.arguments | more, num_rows=CASE.num_rows)
    model = model_of(CASE)
    if checkpoint:
        empty(model)
    trainer = make_trainer(case, folder, is_patched=is_patched, model=model)
    trainer.train(resume_from_checkpoint=checkpoint)
    return found_of(trainer, {"step": float(trainer.state.best_global_step or 0)})


def runs(folder: str, is_patched: bool, checkpoints: list[str | None]) -> list[Trained]:
    return [
        run(f"{folder}/{number}", is_patched, checkpoint)
        for number, checkpoint in enumerate(checkpoints)
    ]


def from_both(folder: str, ours: str, stocks: str) -> Trained:
    """A stock trainer can't go on from ours, which it says rather than begin a new optimizer."""
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt"):
        run(f"{folder}/ours", False, ours)
    return run(f"{folder}/stocks", False, stocks)


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_runs_resume_at_the_same_degree_and_at_another(tmp_path: Path) -> None:
    one, two, back = (str(tmp_path / name) for name in ("one", "two", "back"))
    first = "0/checkpoint-4"
    ((whole,),) = run_launched(runs, 1, one, False, [None])
    by_rank = run_launched(runs, 2, two, True, [None, f"{two}/{first}", f"{one}/{first}"])
    (resumed,) = run_launched(from_both, 1, back, f"{two}/{first}", f"{one}/{first}")
    for best, same, other in by_rank:
        assert not complaints(best, whole)
        assert best.evaluated == {"step": 4}  # of 12
        for found in (same, other):
            assert not complaints(found, resumed)
    # The run that was not interrupted logged the same, but for what it took back at its end.
    assert resumed.logged[-2] == pytest.approx(whole.logged[-2], rel=1e-5)
    check_files(tmp_path / "one" / first, tmp_path / "two" / first)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_8bit"])
def test_any_optimizers_states_go_on(optim: str, tmp_path: Path) -> None:
    """torch's keeps no states, transformers' factored ones, bitsandbytes' some of 8 bits."""
    more = {"max_steps": 4, "optim": optim, "save_strategy": "steps", "save_steps": 2}
    case = Case("", arguments=more | {"learning_rate": 1e-3})
    logged = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = make_trainer(case, tmp_path, is_patched=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        logged.append(
            [numbers(line)["loss"] for line in trainer.state.log_history if "loss" in line]
        )
        logged[-1].append(weights_of(trainer.model)["model.embed_tokens.weight"].sum().item())
    assert logged[0] == logged[1]


def check_files(stock: Path, ours: Path) -> None:
    """Stock files, of which nothing says that the model was patched, and ours beside them."""
    names = {path.name for path in ours.iterdir()} ^ {path.name for path in stock.iterdir()}
    random = {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}
    states = {"optimizer.pt", "optimizer_state"}
    assert names == {".begun", "longctx.json", "manifest.json", *random, *states}
    assert saved(ours) == saved(stock)
    record = json.loads((ours / "longctx.json").read_text())
    assert record["sequence_degree"] == record["num_processes"] == 2
    assert record["config"]["ring_degree"] == 2
    assert set(record["versions"]) == {"longctx-patch", "torch", "transformers"}
    assert record["versions"]["longctx-patch"] == version("longctx-patch")
