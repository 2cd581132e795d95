"""Makes what a run over one of TRL's trainers trains and evaluates on."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from datasets import concatenate_datasets

from longctx_patch.recipes import models
from longctx_patch.recipes.data.losses import Losses, say_losses
from longctx_patch.recipes.data.reading import Reading
from longctx_patch.recipes.data.records import FIELDS
from longctx_patch.recipes.data.sources import check_apart, check_evaluation, first_kind
from longctx_patch.recipes.data.token_table import losses_of, mixed, stream_of, table_of
from longctx_patch.recipes.row_order import evenly
from longctx_patch.recipes.trl_settings import TrlSettings, parse


class RunData(NamedTuple):
    """Tables (or streams) of rows."""

    train: Any
    evaluation: Any
    reading: Reading
    args: Any
    """The trainer's own."""
    sources: tuple[tuple[str, int], ...] = ()
    """Each source of the train table, and how many rows it has."""

    allows_dropped: bool = False

    @property
    def losses(self) -> dict[str, Losses]:
        """Counts the records that are in no row, by `train` and `eval`. Rows that are held out of
        the train table have no losses of their own."""
        losses, held_out = losses_of(self.train), losses_of(self.evaluation)
        return {"train": losses} if held_out == losses else {"train": losses, "eval": held_out}

    def say_losses(self, say: Callable[[str], object]) -> None:
        """Print what of the records is in no row. Raises ValueError if that is much of them."""
        if not hasattr(self.train, "__len__"):
            say(f"train data: a stream, so that too_long={self.reading.too_long} is not counted")
        for name, losses in self.losses.items():
            say_losses(losses, f"{name} data", allowed=self.allows_dropped, say=say)

    @property
    def packs(self) -> bool:
        return bool(getattr(self.args, "packing", False))

    @property
    def packs_evaluation(self) -> bool:
        said = getattr(self.args, "eval_packing", None)
        return self.packs if said is None else bool(said)


def tables_of_run(file: Path) -> RunData:
    """Returns what the run with this settings file will train on. Needs no GPU.

    Raises ValueError as the run would.
    """
    from trl import DPOConfig, SFTConfig

    kind = DPOConfig if file.stem == "dpo" else SFTConfig
    on_cpu = ["--use-cpu", "1", "--bf16", "0"]  # nothing is computed here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of TRL's own defaults
        settings, args = parse(kind, ["--config", str(file), *on_cpu])
    if settings.streaming:
        raise ValueError(f"{file}: streaming, so that there is no table to look at.")
    config, tokenizer = models.load_config(settings), models.load_tokenizer(settings)
    return load_data(settings, args, reading_of(settings, args, tokenizer, config.vocab_size))


def reading_of(settings: TrlSettings, args: Any, tokenizer: Any, vocab_size: int) -> Reading:
    """Returns how a run's records become rows. Raises ValueError for another task's records."""
    kind = first_kind(settings.data[0], settings.text_field)
    is_dpo = not hasattr(args, "assistant_only_loss")
    if is_dpo != (kind == "preference"):
        wanted = FIELDS["preference"] if is_dpo else "text, messages, completions or input_ids"
        raise ValueError(
            f"{settings.data[0]} has records with {FIELDS[kind]}, and this recipe takes {wanted}. "
            f"Use longctx_patch.recipes.{'sft' if is_dpo else 'dpo'}."
        )
    assistant_only = getattr(args, "assistant_only_loss", False)
    if assistant_only and kind in ("text", "tokens"):
        raise ValueError(
            f"assistant_only_loss with records that have {FIELDS[kind]}: only conversations have "
            "an assistant. Leave it out."
        )
    return Reading(
        tokenizer,
        kind,
        settings.seq_len,
        too_long=settings.too_long,
        text_field=settings.text_field,
        assistant_only=assistant_only,
        may_leave_out=tuple(settings.may_leave_out),
        split_special_tokens=settings.split_special_tokens,
        completion_only=getattr(args, "completion_only_loss", None) is not False,
        vocab_size=vocab_size,
    )


def load_data(settings: TrlSettings, args: Any, reading: Reading) -> RunData:
    """Make the tables, or find them made; each process of a run calls this."""
    check_apart(args.output_dir, [*settings.data, *settings.eval_data])
    check_evaluation(settings.data, settings.eval_data)
    if settings.streaming:
        losses = Losses(refuses=not settings.allow_dropped)
        train = stream_of(settings.data[0], reading, losses)
        evaluation = _evaluation(settings, args, reading)
        return RunData(train, evaluation, reading, args, allows_dropped=settings.allow_dropped)
    tables = _tables(settings.data, args, reading)
    if settings.data_shares:
        train = mixed(tables, settings.data_shares, seed=args.seed)
    else:
        train = concatenate_datasets(tables)
    evaluation = _evaluation(settings, args, reading)
    if settings.eval_share:
        parts = train.train_test_split(settings.eval_share, seed=args.seed)
        train, evaluation = parts["train"], parts["test"]
    sources = zip(settings.data, map(len, tables), strict=True)
    return RunData(train, evaluation, reading, args, tuple(sources), settings.allow_dropped)


def packed_rows(table: Any, args: Any, name: str) -> Any:
    """The rows that TRL's SFTTrainer packs of a table (`SFTTrainer._prepare_dataset`), which it
    then finds in the cache. `name`: `train` or `eval`."""
    from trl.data_utils import pack_dataset

    rows = table.select_columns(["input_ids", "labels"])
    if args.shuffle_dataset:
        rows = rows.shuffle(seed=args.seed)
    options = {"num_proc": args.dataset_num_proc, "desc": f"Packing {name} dataset"}
    return pack_dataset(rows, args.max_length, args.packing_strategy, options)


def _tables(sources: list[str], args: Any, reading: Reading) -> list[Any]:
    num_proc = args.dataset_num_proc or max(1, (os.cpu_count() or 1) // 2)
    return [table_of(source, reading, num_proc=num_proc) for source in sources]


def _evaluation(settings: TrlSettings, args: Any, reading: Reading) -> Any:
    if not settings.eval_data:
        return None
    rows = concatenate_datasets(_tables(settings.eval_data, args, reading))
    most = settings.max_eval_samples
    return rows.select(evenly(len(rows), most)) if most else rows
