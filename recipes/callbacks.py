"""Runs beside a recipe's trainer: metrics.jsonl, the stages of its start, and when it saves for
which run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from longctx_patch.checkpoints.fingerprint import write_run
from longctx_patch.checkpoints.series import checkpoints_of
from longctx_patch.checkpoints.signals import Agreement, StopSignals
from longctx_patch.recipes.metrics import MetricsFile, peak_memory_bytes
from longctx_patch.recipes.stages import Stages
from longctx_patch.rules.together import own_rank
from longctx_patch.trainer.bad_steps import SKIPPED
from longctx_patch.trainer.watching import SLOW_RANKS


class MetricsCallback(TrainerCallback):
    """Writes what the trainer logs into metrics.jsonl, with speed and memory."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._file: MetricsFile | None = None
        self._last: tuple[float, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._file = MetricsFile(
            Path(args.output_dir),
            writes=state.is_world_process_zero,
            first_step=state.global_step,
        )
        self._last = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "train_runtime" in logs:
            return
        if SKIPPED in logs:
            return self.write(step=logs[SKIPPED], loss=None, skipped=logs["skipped"])
        if SLOW_RANKS in logs:
            return self.write(step=state.global_step, **{SLOW_RANKS: logs[SLOW_RANKS]})
        values = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if "loss" in values:
            values |= self._speed(values.get("num_tokens"))
            values["peak_memory_bytes"] = peak_memory_bytes(torch.device(args.device))
        self.write(step=state.global_step, **values)

    def write(self, **values: Any) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(**values)

    def _speed(self, tokens: float | None) -> dict[str, float]:
        """Tokens per second since the last log."""
        now, before = time.perf_counter(), self._last
        if tokens is None:
            return {}
        self._last = (now, tokens)
        if before is None or tokens <= before[1]:
            return {}
        speed = (tokens - before[1]) / (now - before[0])
        return {
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / self._num_devices,
        }


class StagesCallback(TrainerCallback):
    """Goes through the last stages of a start: the first step, and its end."""

    def __init__(self, stages: Stages) -> None:
        self._stages: Stages | None = stages

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stages is not None:
            self._stages.enter("first step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stages is not None:
            self._stages.end(Path(args.output_dir))
            self._stages = None


class RunFileCallback(TrainerCallback):
    """Writes the run's fingerprint into each checkpoint that the trainer has saved."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        """`run`: the fingerprint that a run which goes on must have."""
        self._run = run

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if own_rank() == 0:
            folder = checkpoints_of(args.output_dir).path_of(state.global_step)
            write_run(folder, state.global_step, self._run)


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
        answer(self._stop, state, control)


def answer(stop: StopSignals, state: Any, control: Any) -> None:
    """Have the trainer save and end after a step in which the ranks have agreed to."""
    if stop.agreed:
        control.should_save = control.should_training_stop = True
    if state.global_step >= state.max_steps:
        stop.agreed = 0  # the training ends anyway


def say_stopped(trainer: Any, stop: StopSignals) -> None:
    """Print which signal stopped a run, and after which step."""
    step = trainer.state.global_step
    place = checkpoints_of(trainer.args.output_dir).path_of(step)
    trainer.accelerator.print(stop.words(step, place), flush=True)
