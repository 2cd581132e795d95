"""What a recipe adds to the checkpoints of transformers' trainers: when, and of which run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from longctx_patch.checkpoints.output_folder import Output
from longctx_patch.checkpoints.series import trainer_checkpoints_of
from longctx_patch.checkpoints.signals import Agreement, StopSignals
from longctx_patch.checkpoints.train_state import write_run
from longctx_patch.recipes.run_record import RECORD_FILE
from longctx_patch.recipes.trl_settings import TrlSettings
from longctx_patch.rules.together import own_rank


def output_of(settings: TrlSettings, args: Any) -> Output:
    """Where the run writes, and how it is asked to begin there."""
    return Output(
        folder=Path(args.output_dir),
        checkpoints=trainer_checkpoints_of(args.output_dir),
        resume=settings.resume,
        record=RECORD_FILE,
    )


class RunFileCallback(TrainerCallback):
    """Writes the run's fingerprint into each checkpoint that the trainer has saved."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        """`run`: the fingerprint that a run which goes on must have."""
        self._run = run

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if own_rank() == 0:
            folder = trainer_checkpoints_of(args.output_dir).path_of(state.global_step)
            write_run(folder, state.global_step, self._run)


class FoundBefore:
    """Mixed into a trainer: `Output.find` has checked the checkpoint before the model was built."""

    def _whole(self, asked: str | None) -> str | None:
        return asked


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
