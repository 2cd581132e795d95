"""Trains the text recipe's rows by LongContextTrainer.

A batch of this trainer is a whole optimizer step: this process's shards, one for each forward. So
stages may accumulate over other numbers of forwards, and a step's numbers follow from its own.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from longctx_patch import LongContextTrainerMixin, PatchHandle
from longctx_patch.checkpoints.signals import StopSignals
from longctx_patch.checkpoints.train_state import TrainState
from longctx_patch.health.finite import FiniteSteps
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.health.where import Pass, source_of
from longctx_patch.loss.law import count_valid_tokens
from longctx_patch.memory.random_state import RandomState
from longctx_patch.recipes.metrics import MetricsFile, ProgressBar, peak_memory_bytes
from longctx_patch.recipes.run_batches import Data, micro_batches
from longctx_patch.recipes.settings import Settings
from longctx_patch.recipes.train_step import run_batches

Batches = list[dict[str, torch.Tensor]]


class Steps:
    """The batches of each step that is left, whose plans are made during the step before it."""

    def __init__(self, data: Data, handle: PatchHandle, first: int, last: int) -> None:
        self._data, self._handle, self._steps = data, handle, range(first, last)
        self.dataset = self._steps  # transformers logs how many examples it has

    def __len__(self) -> int:
        return self._steps.stop

    def __iter__(self) -> Iterator[Batches]:
        depth = max(stage.order.accumulation for stage in self._data.stages)
        ahead = self._handle.plan_ahead(micro_batches(self._data, self._steps), depth=depth)
        for step in self._steps:
            yield list(islice(ahead, self._data.at(step).order.accumulation))


class StepTrainer(Trainer):
    """transformers' trainer over a model and an optimizer that are prepared already."""

    steps: Steps
    prepared: TrainState

    def get_train_dataloader(self) -> Any:
        return self.steps

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batches], int]:
        """One step, and its tokens on all processes."""
        found = next(epoch_iterator, None)
        if found is None:
            return [], 0
        self.started = time.perf_counter()
        moved = [{name: value.to(device) for name, value in each.items()} for each in found]
        self.tokens = count_valid_tokens(moved)
        return [moved], self.tokens

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return run_batches(self.accelerator, model, inputs, num_items_in_batch)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *_: Any) -> Any:
        state, accelerator = self.prepared, self.accelerator
        self.model_wrapped, self.optimizer = state.model, state.optimizer
        self.lr_scheduler, self.state.global_step = state.scheduler, state.step
        # transformers lets Accelerate forget what it has prepared.
        accelerator._models, accelerator._optimizers = [state.model], [state.optimizer]
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        return state.model, train_dataloader


class TextTrainer(LongContextTrainerMixin, StepTrainer):
    """Trains every step that is left, and hands each on to `after_step` when its line of
    metrics.jsonl is written."""

    def __init__(
        self,
        settings: Settings,
        data: Data,
        handle: PatchHandle,
        state: TrainState,
        accelerator: Any,
        *,
        watchdog: Watchdog,
        stop: StopSignals,
        evaluated: Callable[[], dict[str, Any]],
        after_step: Callable[[], bool],
    ) -> None:
        """
        Args:
            evaluated: the numbers of evaluations that are due after the step. Collective.
            after_step: saves; returns whether the training ends. Collective.
        """
        self._given, self.prepared, self._data = accelerator, state, data
        self.steps = Steps(data, handle, state.step, settings.max_steps)
        self._settings, self._stop, self._handle = settings, stop, handle
        self._evaluated, self._after_step = evaluated, after_step
        self._found: dict[str, Any] = {}
        model = accelerator.unwrap_model(state.model)
        uses_cache = model.config.use_cache
        with RandomState.now(accelerator.device).replayed():  # transformers seeds all alike
            super().__init__(
                model=model,
                args=arguments_of(settings, accelerator),
                train_dataset=[{"input_ids": data.document().tolist()}],
                long_context=handle,
                watchdog=watchdog,
                skip_bad_steps=settings.skip_bad_steps,
                sentinel_every=settings.sentinel_every,
            )
        model.config.use_cache = uses_cache  # transformers switches it off for good
        self.remove_callback(PrinterCallback)
        self.add_callback(AfterStep(self))
        writes = accelerator.is_main_process
        self._metrics = MetricsFile(Path(settings.output), writes=writes, first_step=state.step)
        self._bar = ProgressBar(
            total=settings.max_steps, initial=state.step, disable=not writes, unit="step"
        )

    @property
    def replicas(self) -> Any:
        """Compares replicas before a checkpoint."""
        return self._health

    def create_accelerator_and_postprocess(self) -> None:
        """Take the run's, with its patched model."""
        self.accelerator, self.long_context_handle = self._given, self._handle
        self.is_deepspeed_enabled, self.is_fsdp_enabled = False, self._given.is_fsdp2

    def require_agreement(self) -> None:
        """The recipe has compared ranks before it wrapped the model."""

    def _finite_steps(self) -> FiniteSteps:
        if self._guard is None:
            skips, history = self._settings.skip_bad_steps, self.prepared.history
            self._guard = FiniteSteps(self.optimizer, skip_bad_steps=skips, history=history)
        return self._guard

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._batches = inputs
        self._learning_rate = self.optimizer.param_groups[0]["lr"]
        return super().training_step(model, inputs, *args, **kwargs)

    def _explain_step(self, step: Any) -> str:
        model, tokens = self.model_wrapped, self.tokens
        again = partial(run_batches, self.accelerator, model)
        passes = [
            Pass(partial(again, [batch], tokens, averages=False), said)
            for batch, said in zip(self._batches, self._data.called(step.number - 1), strict=True)
        ]
        return source_of(model, passes, step.random)

    def note(self, said: dict[str, Any]) -> None:
        """Take an entry of the trainer's log into the line of the step."""
        self._found |= {
            name: said[name] for name in ("sentinel_error", "slow_ranks") if name in said
        }

    def end_step(self) -> bool:
        """Write the step's line of metrics.jsonl; returns whether the training ends. Collective."""
        state, handle = self.prepared, self.long_context_handle
        state.step = self.state.global_step
        self._settle_step()  # waits for the whole step
        values = self._values()
        handle.reserve_host(0)  # the optimizer has made its states
        values |= self._found | self._evaluated()
        self._found = {}
        kept = {
            "layers_not_recomputed": handle.checkpointing.num_whole_layers,
            "layers_offloaded": handle.checkpointing.num_offloaded_layers,
            "mlp_tiles": max(handle.mlp_tiles),
        }
        self._metrics.write(**values, **self._data.metrics(state.step - 1), **kept)
        speed = f"{values['tokens_per_second']:.0f}"
        self._bar.set_postfix(loss=f"{values['loss']:.4f}", tok_s=speed, refresh=False)
        self._bar.update()
        if ends := self._after_step() or state.step == self._settings.max_steps:
            self._bar.close()
        return ends

    def _values(self) -> dict[str, Any]:
        """The step's numbers. Ranks agree whether one of them was asked to stop."""
        numbers, accelerator = self.last_numbers, self.accelerator
        device = accelerator.device
        mine = torch.tensor(
            [peak_memory_bytes(device), self._stop.asked], dtype=torch.float64, device=device
        )
        peak_bytes, self._stop.agreed = map(
            int, accelerator.gather(mine).view(-1, 2).amax(0).tolist()
        )
        speed = self.tokens / (time.perf_counter() - self.started)
        return {
            "step": self.prepared.step,
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": self._learning_rate,
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / accelerator.num_processes,
            "peak_memory_bytes": peak_bytes,
            **({} if numbers.is_applied else {"skipped": numbers.problem}),
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """metrics.jsonl has it."""


class AfterStep(TrainerCallback):
    """Ends each step after the other callbacks."""

    def __init__(self, trainer: TextTrainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._trainer.note(logs or {})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.end_step():
            control.should_training_stop = True


def arguments_of(settings: Settings, accelerator: Any) -> TrainingArguments:
    """What of the settings transformers' loop reads."""
    return TrainingArguments(
        output_dir=settings.output,
        max_steps=settings.max_steps,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        use_cpu=accelerator.device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
