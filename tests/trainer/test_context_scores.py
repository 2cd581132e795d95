"""A callback evaluates the trained model over two processes as the stock model does on one, and
training is what it is without it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from longctx_patch import ContextEvaluation, LongContextConfig, patch
from longctx_patch.trainer.context_scores import PREFIX, ContextEvaluationCallback
from tests.evaluation.test_context_evaluation import ASKED, stock_losses
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, make_trainer, numbers

CASE = Case("evaluated", config={"ring_degree": 2}, arguments={"max_steps": 4})
NAMES = (f"{PREFIX}/loss/0-16", f"{PREFIX}/loss/16-61")


class Stock(TrainerCallback):
    """The same numbers from the stock model's logits."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % 2 == 0:
            self.found.append(stock_losses(given["model"]))
            given["model"].train()


def train(folder: str) -> list[dict[str, float]]:
    trainer = make_trainer(CASE, folder, is_patched=True)
    callback = ContextEvaluationCallback(trainer, ASKED, every=2)
    trainer.add_callback(callback)
    trainer.train()
    assert list(callback.scores) == [2, 4]
    return [numbers(entry) for entry in trainer.state.log_history]


def test_scores_in_the_log(tmp_path: Path) -> None:
    stock, own = make_trainer(CASE, tmp_path / "stock", is_patched=False), Stock()
    stock.add_callback(own)
    stock.train()
    by_rank = run_launched(train, 2, str(tmp_path / "patched"))
    for logged in by_rank:
        scores = [entry for entry in logged if NAMES[0] in entry]
        assert [entry["step"] for entry in scores] == [2, 4]
        for entry, wanted in zip(scores, own.found, strict=True):
            assert [entry[name] for name in NAMES] == pytest.approx(wanted, rel=1e-5)
        losses = [entry["loss"] for entry in logged if "loss" in entry]
        wanted = [entry["loss"] for entry in stock.state.log_history if "loss" in entry]
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(CASE, tmp_path, is_patched=False)
    with pytest.raises(ValueError, match="every=0"):
        ContextEvaluationCallback(trainer, ASKED, every=0)
    callback = ContextEvaluationCallback(trainer, ASKED, every=1)
    nothing = SimpleNamespace(global_step=1)
    with pytest.raises(ValueError, match="handle that patch"):
        callback.on_train_begin(None, nothing, None)
    handle = patch(trainer.model, LongContextConfig())
    wrong = ContextEvaluation(lengths=(8,))
    callback = ContextEvaluationCallback(trainer, wrong, every=1, handle=handle)
    with pytest.raises(ValueError, match="nothing to evaluate: give texts"):
        callback.on_train_begin(None, nothing, None)
