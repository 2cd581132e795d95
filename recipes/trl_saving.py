"""Checkpoints of transformers' trainers with a manifest, and their deletion after it is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from longctx_patch.checkpoints.manifest import problems_of, seal
from longctx_patch.checkpoints.names import Series, trainer_checkpoints_of
from longctx_patch.checkpoints.retention import Retention, delete_old
from longctx_patch.plugin.together import own_rank, refuse_together
from longctx_patch.recipes.run_record import RECORD_FILE
from longctx_patch.recipes.saving.output import Output
from longctx_patch.recipes.saving.signals import Agreement, StopSignals
from longctx_patch.recipes.saving.writing import write_run
from longctx_patch.recipes.trl_settings import TrlSettings


def output_of(settings: TrlSettings, args: Any) -> Output:
    """Where the run writes, and how it is asked to begin there."""
    return Output(
        folder=Path(args.output_dir),
        checkpoints=trainer_checkpoints_of(args.output_dir),
        resume=settings.resume,
        record=RECORD_FILE,
    )


class SealCallback(TrainerCallback):
    """Writes the manifest of each checkpoint that the trainer has saved.

    It takes `save_total_limit` over: the trainer would delete old checkpoints before the new one is
    complete on disk.
    """

    def __init__(self, args: Any, run: Mapping[str, Any]) -> None:
        """`run`: the fingerprint that a run which goes on must have."""
        self._run = run
        self._limit = args.save_total_limit or 0
        args.save_total_limit = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoints = trainer_checkpoints_of(args.output_dir)
        folder = checkpoints.path_of(state.global_step)
        if own_rank() == 0:
            write_run(folder, state.global_step, self._run)
        seal(folder)
        if own_rank() == 0:
            self._delete_old(checkpoints, state.best_model_checkpoint)

    def _delete_old(self, checkpoints: Series, best: str | None) -> None:
        """As transformers does it: the best one is one of those that are kept."""
        spared = {Path(best)} if best else set()
        newest = {each.path for each in checkpoints.found()[-self._limit :]}
        others = self._limit - 1 if spared - newest else self._limit
        # The newest is kept beside the best also where one alone is asked for.
        keep_last = max(1, others) if self._limit else 0
        delete_old(checkpoints, Retention(keep_last=keep_last), spared=spared)


class CheckedBest:
    """Mixed into a trainer: the best checkpoint is checked before its weights become the model's.

    transformers would take damaged weights, and of a missing checkpoint only warn.
    """

    state: Any
    args: Any

    def _load_best_model(self) -> None:
        """Raises ValueError on all ranks for a checkpoint that is not whole."""
        if (named := self.state.best_model_checkpoint) is not None:
            best = Path(self.args.output_dir) / Path(named).name  # the folder may have been moved
            refuse_together(
                f"{best}, the best checkpoint, can't be final/: {problem}. To take the last step "
                "in its place, go on with --resume --load_best_model_at_end false --allow-change "
                "load_best_model_at_end."
                for problem in problems_of(best)
            )
            self.state.best_model_checkpoint = str(best)
        super()._load_best_model()  # type: ignore[misc]


class StopCallback(TrainerCallback):
    """Saves and ends the training after the step in which a signal came, on all ranks alike."""

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop
        self._agreement: Agreement | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._agreement = Agreement(self._stop)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._agreement is not None:
            self._agreement.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._agreement is not None:
            self._agreement.end()
        if state.global_step >= state.max_steps:
            self._stop.agreed = 0  # the training ends anyway
        elif self._stop.agreed:
            control.should_save = control.should_training_stop = True
