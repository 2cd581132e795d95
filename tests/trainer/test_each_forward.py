"""What transformers repeats on the host in each forward is left out, and logs stay its own."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn
from transformers import TrainerCallback

from tests.health.flaw import Flaw
from tests.trainer.trained import Case, make_trainer

STEPS = 6
CASE = Case("each", arguments={"logging_steps": STEPS, "max_steps": STEPS})


@pytest.mark.parametrize("filters", [True, False])
def test_the_log_of_a_run_whose_last_loss_is_not_finite_is_that_of_the_stock_trainer(
    tmp_path: Path, filters: bool
) -> None:
    logged = []
    for given in ({"is_patched": True, "skip_bad_steps": 1}, {"is_patched": False}):
        trainer = make_trainer(CASE, tmp_path, **given)
        trainer.args.logging_nan_inf_filter = filters
        Flaw(trainer.model, "loss", {STEPS})
        trainer.train()
        assert trainer.args.logging_nan_inf_filter is filters
        (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        logged.append((loss, trainer.state.total_flos))
    assert logged[0] == pytest.approx(logged[1], rel=1e-6, nan_ok=True)
    assert math.isfinite(logged[0][0]) is filters


class LeavesALayer(TrainerCallback):
    """Leaves a layer in evaluation mode after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            given["model"].model.layers[1].eval()


def test_modules_are_switched_to_training_where_one_of_them_is_not(tmp_path: Path) -> None:
    trainer = make_trainer(CASE, tmp_path, is_patched=True, callbacks=[LeavesALayer()])
    switched, train = list[int](), nn.Module.train

    def noted(module: nn.Module, mode: bool = True) -> nn.Module:
        if mode:
            switched.append(trainer.state.global_step)
        return train(module, mode)

    with patch.object(nn.Module, "train", noted):
        trainer.train()
    assert switched == [2] * len([*trainer.model.modules()])
    assert all(module.training for module in trainer.model.modules())
