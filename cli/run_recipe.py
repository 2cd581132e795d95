"""Which recipe a run folder is for, by what its data holds, and that recipe's settings."""

import dataclasses
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import FIELDS, Kind, kind_of, named
from longctx_patch.recipes.data.sources import parts_of
from longctx_patch.recipes.settings import ModelSettings, Parallelism, Settings

RecipeName = Literal["finetune", "sft", "dpo"]
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)
LEARNING_RATES = {("sft", True): 2e-4, ("sft", False): 2e-5, ("dpo", True): 1e-5}
"""TRL's defaults, and ten times as much for an adapter, as TRL advises; by (recipe, adapter)."""
SAVE_STEPS = 25
NUM_CHECKED = 20
"""Records of each source that are read before a run folder is written."""
TEXT_FIELD = "text"


class Task(NamedTuple):
    """What a run learns from what."""

    recipe: RecipeName
    assistant_only: bool
    """Whether only the assistant's tokens are learned."""


def choose_task(options: PatchOptions) -> Task:
    """What was asked for, or what the first records of the data need.

    Raises ValueError for data that the recipe can't take.
    """
    asked: RecipeName | None = "dpo" if options.dpo else "sft" if options.sft else None
    if options.dpo and options.sft:
        raise ValueError("both --sft and --dpo are set. Choose one.")
    kinds = {source: first_kind(source) for source in (*options.sources, *options.eval_sources)}
    if len(set(kinds.values())) > 1:
        held = "; ".join(f"{source}: {FIELDS[kind]}" for source, kind in kinds.items())
        raise ValueError(f"--data holds records of different kinds ({held}). Give one kind.")
    kind = next(iter(kinds.values()), None)
    if options.dpo and options.pack:
        raise ValueError("--pack with --dpo: pairs are not packed. Leave it out.")
    if kind == "preference" and asked != "dpo":
        raise ValueError("--data has chosen and rejected answers: add --dpo to learn from them.")
    if asked == "dpo" and kind not in (None, "preference"):
        assert kind is not None
        raise ValueError(f"--dpo with records that have {FIELDS[kind]}: {FIELDS['preference']}.")
    if options.train_on == "assistant" and kind in ("text", "tokens"):
        raise ValueError("--train-on assistant with data that is no conversation. Leave it out.")
    is_text = kind in (None, "text") and not options.eval_data
    only = options.train_on == "assistant" or (options.train_on is None and kind == "chat")
    return Task(asked or ("finetune" if is_text else "sft"), only and asked != "dpo")


def first_kind(source: str) -> Kind:
    """The kind of a source's first record."""
    try:
        for part in parts_of(source):
            for record in records_of(part):
                return kind_of(record, TEXT_FIELD)
    except ValueError as error:
        hint = (
            " `longctx patch` reads the field 'text' only: leave --data out, and set the data and "
            "text_field: in the run folder's settings."
        )
        raise ValueError(
            f"--data: {named(source, error)}{hint if '--text-field' in str(error) else ''}"
        ) from error
    raise ValueError(f"--data {source}: no text in it. Give files or folders with text.")


def check_first_records(task: Task, options: PatchOptions, tokenizer: Any, vocab_size: int) -> None:
    """Read some records as the recipe will read all of them. Raises ValueError for what it would
    refuse."""
    if task.recipe == "finetune":
        return
    for source in (*options.sources, *options.eval_sources):
        reading = Reading(
            tokenizer,
            first_kind(source),
            options.seq_len,
            assistant_only=task.assistant_only,
            vocab_size=vocab_size,
        )
        try:
            for record in islice(records_of(parts_of(source)[0]), NUM_CHECKED):
                list(reading.rows(record))
        except ValueError as error:
            raise ValueError(f"--data: {named(source, error)}") from error


def trl_settings(task: Task, options: PatchOptions, settings: Settings) -> dict[str, Any]:
    """The settings file of a recipe over TRL, by names of our settings and of the trainer's."""
    shared = (*dataclasses.fields(ModelSettings), *dataclasses.fields(Parallelism))
    found = {field.name: getattr(settings, field.name) for field in shared}
    del found["lora"]  # a flag --full is then enough
    found |= {
        "dtype": options.dtype or "auto",
        "data": options.sources,
        "eval_data": options.eval_sources,
        "too_long": "refuse",
    }
    found |= _training(task.recipe, options, settings)
    if task.recipe == "sft":
        found |= {"assistant_only_loss": task.assistant_only, "packing": options.pack}
    return found


def _training(recipe: RecipeName, options: PatchOptions, settings: Settings) -> dict[str, Any]:
    evaluates = bool(options.eval_data)
    return {
        "output_dir": str(options.folder / "training"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "learning_rate": LEARNING_RATES.get((recipe, options.lora), 1e-6),
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": SAVE_STEPS,
        "load_best_model_at_end": evaluates,
        "bf16": not options.cpu,
        "use_cpu": options.cpu,
        "report_to": "none",
        "seed": 0,
    }
