"""Chooses the recipe of a run folder by what its data holds, and that recipe's settings."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

from longctx_patch.cli.arguments import require_trl
from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.recipes.data.losses import EMPTY, Losses
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import FIELDS, BadRecord, Kind, LongRecord, Record, named
from longctx_patch.recipes.data.sources import check_evaluation, first_kind, parts_of
from longctx_patch.recipes.data.text_reading import text_of
from longctx_patch.recipes.settings import ModelSettings, Parallelism, Settings

RecipeName = Literal["finetune", "sft", "dpo"]
LEARNING_RATES = {("sft", True): 2e-4, ("sft", False): 2e-5, ("dpo", True): 1e-5}
"""TRL's defaults, and ten times as much for an adapter, as TRL advises; by (recipe, adapter)."""
SAVE_EVERY = 25
"""Steps between checkpoints, so that an interrupted run can be resumed."""
NUM_CHECKED = 20
"""Records of each source's first file that are read before a run folder is written."""


class Task(NamedTuple):
    """Says what a run learns from what."""

    recipe: RecipeName
    assistant_only: bool
    """Whether only the assistant's tokens are learned."""


def choose_task(options: PatchOptions) -> Task:
    """Returns what was asked for, or what the first records of the data need.

    Raises ValueError for data that the recipe can't take.
    """
    asked: RecipeName | None = "dpo" if options.dpo else "sft" if options.sft else None
    if options.dpo and options.sft:
        raise ValueError("both --sft and --dpo are set. Choose one.")
    kinds = {
        source: _kind(source, options.text_field, option)
        for option, sources in options.sources_by_option.items()
        for source in sources
    }
    if len(set(kinds.values())) > 1:
        held = "; ".join(f"{source}: {FIELDS[kind]}" for source, kind in kinds.items())
        raise ValueError(f"--data holds records of different kinds ({held}). Give one kind.")
    check_evaluation(options.sources, options.eval_sources)
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
    recipe = asked or ("finetune" if kind in (None, "text") else "sft")
    if recipe == "finetune" and options.too_long:
        raise ValueError(
            f"--too-long {options.too_long} with plain text: rows are cut from the joined text. "
            "Leave it out; or add --sft, where each record is a row."
        )
    require_trl(recipe)
    for name in ("mixture", "stages"):
        if recipe != "finetune" and (asked_for := getattr(options, name)):
            raise ValueError(
                f"--{name} {asked_for} with the recipe {recipe}: it is for plain text. Leave it "
                "out; --data-shares weighs sources."
            )
    only = options.train_on == "assistant" or (options.train_on is None and kind == "chat")
    return Task(recipe, only and asked != "dpo")


def _kind(source: str, text_field: str, option: str) -> Kind:
    """The kind of a source's first record; `option` named it."""
    try:
        return first_kind(source, text_field)
    except ValueError as error:
        raise ValueError(f"{option}: {named(source, error)}") from error


def check_first_records(
    task: Task, options: PatchOptions, tokenizer: Any, vocab_size: int
) -> Losses:
    """Read the first records of every file as the recipe will read all of them; returns what of
    them is in no row. Raises ValueError for what the recipe would refuse."""
    losses = Losses()
    for option, sources in options.sources_by_option.items():
        for source in sources:
            kind = _kind(source, options.text_field, option)
            reading = Reading(
                tokenizer,
                kind,
                options.seq_len,
                assistant_only=task.assistant_only,
                too_long=options.too_long or "refuse",
                may_leave_out=tuple(options.may_leave_out),
                split_special_tokens=options.split_special_tokens,
                text_field=options.text_field,
                vocab_size=vocab_size,
            )
            records = _first_records(source, kind)
            try:
                if task.recipe == "finetune":
                    _count_texts(records, options.text_field, losses)
                else:
                    _read_all(records, reading, losses)
            except ValueError as error:
                raise ValueError(f"{option}: {named(source, error)}") from error
    return losses


def _count_texts(records: Iterable[Record], text_field: str, losses: Losses) -> None:
    for record in records:
        losses.num_records += 1
        if not text_of(record, text_field):
            losses.leave_out(record, EMPTY)


def _read_all(records: Iterable[Record], reading: Reading, losses: Losses) -> None:
    """Raises BadRecord; for records that are too long, the first one's, and says how long others
    are."""
    too_long: list[LongRecord] = []
    for record in records:
        try:
            list(reading.rows_of([record], losses))
        except LongRecord as error:
            too_long.append(error)
    if too_long:
        longest = max(error.tokens for error in too_long)
        raise BadRecord(
            f"{too_long[0]} Of the first records {len(too_long)} are too long; the longest has "
            f"{longest} tokens."
        )


def _first_records(source: str, kind: Kind) -> Iterator[Record]:
    """Some of the first file, and one of each other; of texts, each a whole file, the first."""
    number = NUM_CHECKED
    for part in parts_of(source):
        is_more_text = kind == "text" and part.reader == "text" and number < NUM_CHECKED
        if part.start == 0 and not is_more_text:
            yield from islice(records_of(part), number)
            number = 1


def trl_settings(task: Task, options: PatchOptions, settings: Settings) -> dict[str, Any]:
    """The settings file of a recipe over TRL, by names of our settings and of the trainer's."""
    shared = (*dataclasses.fields(ModelSettings), *dataclasses.fields(Parallelism))
    found = {field.name: getattr(settings, field.name) for field in shared}
    del found["lora"]  # a flag --full is then enough
    found |= {
        "dtype": options.dtype or "auto",
        "data": options.sources,
        "eval_data": options.eval_sources,
        "data_shares": [*options.data_shares],
        "text_field": options.text_field,
        "allow_dropped": options.allow_dropped,
        "too_long": options.too_long or "refuse",
        "may_leave_out": list(options.may_leave_out),
        "split_special_tokens": options.split_special_tokens,
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
        "save_steps": SAVE_EVERY,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": SAVE_EVERY,
        "load_best_model_at_end": evaluates,
        "bf16": not options.cpu,
        "use_cpu": options.cpu,
        "report_to": "none",
        "seed": 0,
    }
