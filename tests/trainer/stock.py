"""A trainer whose checkpoints are sealed, without anything to train."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longctx_patch.checkpoints.manifest import MANIFEST
from longctx_patch.trainer.sealing import SealedCheckpointsMixin


class Stock:
    """The part of transformers' Trainer that loads the best model, and that uploads."""

    loaded: str | None = None
    pushed: list[str]

    def _load_best_model(self) -> None:
        self.loaded = self.state.best_model_checkpoint  # type: ignore[attr-defined]

    def _finalize_training(self, trial: Any) -> str:
        """It would delete folders of the user's too."""
        assert self.args.save_total_limit != 1  # type: ignore[attr-defined]
        return "the end"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_model()
        self._push_from_checkpoint(str(self._saving))  # type: ignore[attr-defined]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing calls a folder whole into which somebody writes."""
        folder = self._saving  # type: ignore[attr-defined]
        self.pushed.append(f"begins: {(folder / MANIFEST).is_file()}")

    def _push_from_checkpoint(self, folder: str) -> None:
        self.pushed.append(f"{Path(folder).name}: {(Path(folder) / MANIFEST).is_file()}")


class Trained(SealedCheckpointsMixin, Stock):
    _watchdog = None
    is_fsdp_enabled = False

    def __init__(self, output: Path, best: str | None, **args: Any) -> None:
        given = {"save_total_limit": None, "save_on_each_node": False} | args
        self.args = SimpleNamespace(output_dir=str(output), **given)
        self.state = SimpleNamespace(best_model_checkpoint=best, global_step=2)
        self.pushed = []

    def _take_states(self) -> None:
        """There is nothing to train."""
        self._late = []

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.args.output_dir)
