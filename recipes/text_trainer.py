"""Trains the text recipe's rows by LongContextTrainer.

A batch of this trainer is a whole optimizer step: this process's shards, one for each forward. So
stages may accumulate over other numbers of forwards, and a step's numbers follow from its own.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments, __version__

from longctx_patch import LongContextTrainerMixin, PatchHandle
from longctx_patch.checkpoints.signals import StopSignals
from longctx_patch.health.pace import PaceCheck
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.health.where import Pass, source_of
from longctx_patch.hf.handle import evaluation_mode
from longctx_patch.loss.law import IGNORE_INDEX, count_valid_tokens
from longctx_patch.memory.random_state import RandomState
from longctx_patch.recipes.callbacks import MetricsCallback, answer
from longctx_patch.recipes.metrics import ProgressBar, peak_memory_bytes
from longctx_patch.recipes.plain_weights import PlainWeights
from longctx_patch.recipes.run_batches import Data, evaluation_batches, micro_batches
from longctx_patch.recipes.settings import Settings
from longctx_patch.trainer.watching import SENTINEL_ERROR, SLOW_RANKS

Batches = list[dict[str, torch.Tensor]]


class Prepared(NamedTuple):
    """Holds what is trained, as Accelerate has wrapped it for this world."""

    model: Any
    optimizer: Any
    scheduler: Any


class StepTrainer(Trainer):
    """transformers' trainer over a model and an optimizer that are prepared already."""

    prepared: Prepared
    tokens: int
    """Labels of the step on all processes."""
    started: float
    """When its batches were there."""

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

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resumed: Any) -> Any:
        self.model_wrapped, self.optimizer, self.lr_scheduler = self.prepared
        # transformers lets Accelerate forget what it has prepared.
        accelerator = self.accelerator
        accelerator._models, accelerator._optimizers = [self.model_wrapped], [self.optimizer]
        if resumed is not None:
            self._load_optimizer_and_scheduler(resumed)
            self._load_scaler(resumed)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        return self.model_wrapped, train_dataloader

    def require_prepared(self) -> None:
        """Raise RuntimeError where transformers trains something else than it was given."""
        taken = Prepared(self.model_wrapped, self.optimizer, self.lr_scheduler)
        pairs = zip(Prepared._fields, taken, self.prepared, strict=True)
        if odd := [name for name, one, other in pairs if one is not other]:
            raise RuntimeError(
                f"transformers {__version__} has prepared its own {odd[0]}, so it begins otherwise "
                "than the recipe expects. Install a transformers that the package asks for."
            )


class Steps:
    """The batches of each step that is left, whose plans are made during the step before it."""

    def __init__(self, trainer: "TextTrainer") -> None:
        self._trainer = trainer
        self.dataset = range(len(self))  # transformers logs how many examples it has

    def __len__(self) -> int:
        return int(self._trainer.args.max_steps)

    def __iter__(self) -> Iterator[Batches]:
        data, steps = self._trainer.data, range(self._trainer.state.global_step, len(self))
        depth = max(stage.order.accumulation for stage in data.stages)
        handle = self._trainer.long_context_handle
        ahead = handle.plan_ahead(micro_batches(data, steps), depth=depth)
        for step in steps:
            yield list(islice(ahead, data.at(step).order.accumulation))


class TextTrainer(PlainWeights, LongContextTrainerMixin, StepTrainer):
    """Trains every step that is left; its StepCallback comes last."""

    def __init__(
        self,
        settings: Settings,
        data: Data,
        handle: PatchHandle,
        prepared: Prepared,
        accelerator: Any,
        *,
        tokenizer: Any,
        pace: PaceCheck,
        watchdog: Watchdog,
    ) -> None:
        """`tokenizer`: saved beside the weights."""
        self._given, self._handle, self.prepared, self.data = accelerator, handle, prepared, data
        self.settings, self._tokenizer, self._pace = settings, tokenizer, pace
        model = accelerator.unwrap_model(prepared.model)
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
                save_in_background=settings.save_in_background,
            )
        model.config.use_cache = uses_cache  # transformers switches it off for good
        self._keep_every = settings.keep_every
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        """Take the run's, with its patched model."""
        self.accelerator, self.long_context_handle = self._given, self._handle
        self.is_deepspeed_enabled, self.is_fsdp_enabled = False, self._given.is_fsdp2

    def require_agreement(self) -> None:
        """The recipe has compared ranks before it wrapped the model."""

    def get_train_dataloader(self) -> Any:
        return Steps(self)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._batches = inputs
        return super().training_step(model, inputs, *args, **kwargs)

    def _explain_step(self, step: Any) -> str:
        model, tokens = self.model_wrapped, self.tokens
        again = partial(run_batches, self.accelerator, model)
        passes = [
            Pass(partial(again, [batch], tokens, averages=False), said)
            for batch, said in zip(self._batches, self.data.called(step.number - 1), strict=True)
        ]
        return source_of(model, passes, step.random)

    def _say(self, text: str) -> None:
        self.accelerator.print(text, flush=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """metrics.jsonl has it."""

    def _load_from_checkpoint(self, *_: Any) -> None:
        """What the run shares with its checkpoint was compared, and states bring the weights."""


class StepCallback(MetricsCallback):
    """Ends each step after the other callbacks: evaluates, writes the line of metrics.jsonl, and
    says whether the step is saved and is the last one."""

    def __init__(self, trainer: TextTrainer, stop: StopSignals) -> None:
        super().__init__(trainer.accelerator.num_processes)
        self._trainer, self._stop, self._found = trainer, stop, dict[str, Any]()
        self._learning_rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self._trainer.require_prepared()
        self._bar = ProgressBar(
            total=args.max_steps,
            initial=state.global_step,
            disable=not state.is_world_process_zero,
            unit="step",
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        self._learning_rate = trainer.optimizer.param_groups[0]["lr"]
        if state.global_step in [stage.of.first for stage in trainer.data.stages[1:]]:
            self._mark("start")  # these rows have another length, and take another time

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._found |= {n: logs[n] for n in (SENTINEL_ERROR, SLOW_RANKS) if n in logs}
        self._note_scores(state.global_step, {n: logs[n] for n in logs if n.startswith("eval_")})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, settings, step = self._trainer, self._trainer.settings, state.global_step
        trainer._settle_step()  # waits for the whole step
        if trainer.accelerator.optimizer_step_was_skipped:  # by a gradient scaler
            trainer.lr_scheduler.step()
        values, handle = self._numbers(step), trainer.long_context_handle
        is_due = step == args.max_steps or (settings.eval_steps and step % settings.eval_steps == 0)
        if trainer.data.evaluation is not None and is_due:
            self._evaluate(step)
        kept = {
            "layers_not_recomputed": handle.checkpointing.num_whole_layers,
            "layers_offloaded": handle.checkpointing.num_offloaded_layers,
            "mlp_tiles": max(handle.mlp_tiles),
        }
        self.write(**values, **self._found, **trainer.data.metrics(step - 1), **kept)
        self._found = {}
        speed = f"{values['tokens_per_second']:.0f}"
        self._bar.set_postfix(loss=f"{values['loss']:.4f}", tok_s=speed, refresh=False)
        self._bar.update()
        if settings.save_every and step % settings.save_every == 0:
            control.should_save = True
        answer(self._stop, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()

    def _evaluate(self, step: int) -> None:
        trainer = self._trainer
        self._mark("evaluate")
        batches = evaluation_batches(trainer.data)
        found = evaluate(trainer.accelerator, trainer.model_wrapped, batches)
        self._mark("step")
        self._found["eval_tokens"] = found.pop("eval_tokens")
        self._note_scores(step, found)

    def _note_scores(self, step: int, scores: dict[str, float]) -> None:
        self._found |= scores
        for name, value in scores.items():
            self._trainer.accelerator.print(f"step {step}: {name} {value:.4f}", flush=True)

    def _mark(self, phase: Any) -> None:
        """For the watchdog."""
        if self._trainer._watchdog is not None:
            self._trainer._watchdog.enter(phase)

    def _numbers(self, step: int) -> dict[str, Any]:
        """Returns a line's numbers of each step. Ranks agree whether one was asked to stop."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        numbers, tokens, device = trainer.last_numbers, trainer.tokens, accelerator.device
        mine = [peak_memory_bytes(device), self._stop.asked]
        all_ = accelerator.gather(torch.tensor(mine, dtype=torch.float64, device=device))
        peak, self._stop.agreed = map(int, all_.view(-1, 2).amax(0).tolist())
        speed = tokens / (time.perf_counter() - trainer.started)
        return {
            "step": step,
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": self._learning_rate,
            "tokens": tokens,
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / accelerator.num_processes,
            "peak_memory_bytes": peak,
            **({} if numbers.is_applied else {"skipped": numbers.problem}),
        }


def arguments_of(settings: Settings, accelerator: Any) -> TrainingArguments:
    """Gives transformers' loop those of the settings that it reads."""
    return TrainingArguments(
        output_dir=settings.output,
        max_steps=settings.max_steps,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        use_cpu=accelerator.device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",  # StepCallback asks for it
        save_total_limit=settings.keep_last or None,
        ignore_data_skip=True,  # Steps begins where the run was
        report_to=[],
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )


def run_batches(
    accelerator: Any, model: Any, batches: list[Any], tokens: int, *, averages: bool = True
) -> torch.Tensor:
    """Forward and backward of every micro batch; returns this process's share of the mean loss over
    the `tokens` of the step. `averages`: whether gradients are averaged over processes at the end,
    which under FSDP2 they always are."""
    loss = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches, start=1):
        # DDP reduces with the last one. FSDP2 would keep unsharded gradients until then.
        reduces = accelerator.is_fsdp2 or (averages and number == len(batches))
        with nullcontext() if reduces else accelerator.no_sync(model):
            part = model(**batch, num_valid_tokens=tokens, use_cache=False).loss
            accelerator.backward(part)
        loss += part.detach()
    return loss


def evaluate(accelerator: Any, model: Any, batches: Iterable[Any]) -> dict[str, Any]:
    """The mean loss over all labels of the evaluation rows: the sum over all processes, divided by
    their number. Collective; `batches` are this process's. A router's loss is no part of it."""
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    options: dict[str, Any] = {"num_valid_tokens": 1, "use_cache": False}
    if getattr(accelerator.unwrap_model(model).config, "output_router_logits", False):
        options["output_router_logits"] = False
    with evaluation_mode(model):
        for batch in batches:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            total[0] += model(**batch, **options).loss.double()
            total[1] += (batch["shift_labels"] != IGNORE_INDEX).sum()
    shares, tokens = accelerator.reduce(total).tolist()
    # The mean of the processes' shares is the sum of the losses, of which there is one token.
    return {"eval_loss": shares / accelerator.num_processes / tokens, "eval_tokens": int(tokens)}
