"""Sums of a trainer's log that go on from a checkpoint: transformers and TRL begin them anew.

Without them the mean loss of the first log after a resumption, `train_loss` at the end and TRL's
`num_tokens` would be those since the resumption.
"""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from longctx_patch.recipes.plain_weights import PlainWeights
from longctx_patch.rules.together import num_ranks, of_all_ranks, own_rank

NAME = "longctx_patch_totals"
"""Among the states of callbacks in a checkpoint's trainer_state.json."""


class WholeRunTotals(PlainWeights):
    """Mixed into one of TRL's trainers: what it logs is counted from the first step of the run."""

    state: Any
    _tr_loss: Any
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _total_train_tokens: int
    _metrics: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_GoOn(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        done = super().train(*args, **kwargs)
        return done._replace(training_loss=done.metrics["train_loss"])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """In place, as transformers returns what it has logged at the end."""
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.state.stateful_callbacks[NAME] = self._totals()
        return super()._save_checkpoint(*args, **kwargs)

    def _totals(self) -> dict[str, Any]:
        """Returns what is counted now, as JSON. Collective."""
        return {
            "losses": of_all_ranks(float(self._tr_loss)),  # since the last log, by rank
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "num_tokens": self._total_train_tokens,
            "metrics": {name: [*map(float, values)] for name, values in _train(self).items()},
        }

    def go_on(self, totals: Mapping[str, Any]) -> None:
        """Count on from what a checkpoint has."""
        losses = totals["losses"]
        # Other ranks than before share the mean, which is what is logged.
        mine = losses[own_rank()] if len(losses) == num_ranks() else sum(losses) / len(losses)
        self._tr_loss.fill_(mine)
        self._total_loss_scalar = totals["total_loss"]
        self._globalstep_last_logged = totals["last_logged"]
        self._total_train_tokens = totals["num_tokens"]
        for name, values in totals["metrics"].items():
            _train(self)[name].extend(values)


def _train(trainer: Any) -> Any:
    """TRL's own metrics of training since the last log: a list of numbers for each name."""
    return trainer._metrics["train"]


class _GoOn(TrainerCallback):
    """Where a training begins, transformers has set its sums to zero."""

    def __init__(self, trainer: WholeRunTotals) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step and NAME in state.stateful_callbacks:
            self._trainer.go_on(state.stateful_callbacks[NAME])
