"""Finds out before the first step whether the longest rows of a run over TRL fit, and says what to
do where they don't."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from longctx_patch.recipes.data.token_table import longest_row_first
from longctx_patch.recipes.memory_report import explained
from longctx_patch.recipes.rehearsal import rehearse
from longctx_patch.recipes.settings import ModelSettings, Parallelism, Settings
from longctx_patch.recipes.trl_settings import TrlSettings
from longctx_patch.trainer.bad_steps import counts_kept

PAIRS = "pairs and their reference are not predicted"


def explained_run(
    settings: TrlSettings, args: Any, trainer: Any, *, compares: bool
) -> AbstractContextManager[None]:
    """`memory_report.explained` for a trainer's run; `compares`: it has a reference."""
    config = trainer.long_context_handle.model.config
    unpredicted = PAIRS if compares else ""
    return explained(
        _as_text_run(settings, args), config, trainer.accelerator, unpredicted=unpredicted
    )


def _as_text_run(settings: TrlSettings, args: Any) -> Settings:
    """A run on plain text with rows as long, which is what the planner knows."""
    shared = (*dataclasses.fields(ModelSettings), *dataclasses.fields(Parallelism))
    return Settings(
        text=settings.data,
        output=args.output_dir,
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        **{field.name: getattr(settings, field.name) for field in shared},
    )


def _why_not(trainer: Any) -> str:
    """Says why a step can't be rehearsed."""
    if not hasattr(trainer.train_dataset, "__len__"):
        return "the longest row of a stream is not known"
    names = ("gradient_checkpointing", "activation_checkpointing")
    if any(getattr(trainer.args, name, False) for name in names):
        return "transformers' own checkpointing runs the layers (checkpoint: none)"
    return ""


def told_apart(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows each of which begins with another token: those of another batch may share
    nothing, and take more memory then. The answers of a pair still share their prompt."""
    return [
        row
        | {name: [number, *row[name][1:]] for name in ("prompt_ids", "input_ids") if name in row}
        for number, row in enumerate(rows)
    ]


def check_longest(trainer: Any) -> None:
    """Rehearse a step of the longest rows, which every rank takes. Raises WillNotFit."""
    table, accelerator = trainer.train_dataset, trainer.accelerator
    if why := _why_not(trainer):
        accelerator.print(f"memory: not rehearsed, since {why}")
        return
    shares = trainer.long_context_handle.config.share_prefixes != "off"
    numbers = longest_row_first(table, shares=shares)[: trainer.args.per_device_train_batch_size]
    rows = told_apart([dict(table[int(number)]) for number in numbers])
    model = trainer.model_wrapped.train()

    def loss() -> torch.Tensor:
        batch = trainer._prepare_inputs(trainer.data_collator([dict(row) for row in rows]))
        tokens = trainer._get_num_items_in_batch([batch], accelerator.device)
        with trainer.compute_loss_context_manager():
            found: torch.Tensor = trainer.compute_loss(model, batch, num_items_in_batch=tokens)
        return found

    forwards = trainer.args.gradient_accumulation_steps
    with counts_kept(trainer), trainer.maybe_activation_offload_context:
        rehearse(trainer, loss, forwards, "with the longest rows ")
