"""Reads what a run trains on, in figures and rows, whichever recipe it is for, and the report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longctx_patch.cli.arguments import require_trl
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.recipes import models
from longctx_patch.recipes.data.conversations import MARKED
from longctx_patch.recipes.data.losses import Losses, too_many
from longctx_patch.recipes.data.token_table import column_lengths, lengths_of, losses_of
from longctx_patch.recipes.next_step import next_of
from longctx_patch.recipes.settings import parse_settings
from longctx_patch.recipes.text_rows import Share, TextRows
from longctx_patch.recipes.text_sources import evaluation_rows, rows_of_run
from longctx_patch.recipes.yaml_file import read_yaml
from longctx_patch.rules.text_table import aligned

if TYPE_CHECKING:
    from longctx_patch.recipes.trl_data import RunData

Facts = list[tuple[str, str, str]]
"""(name, figure, what it counts)"""


class SeenData(NamedTuple):
    """Holds what the model of a run will see."""

    recipe: str
    kind: str
    """What the records hold."""
    seq_len: int
    facts: dict[str, Facts]
    """By `train` and `eval`."""
    lengths: np.ndarray
    """Tokens of each document, or of each row before it is packed."""
    rows: Sequence[Any]
    """As the model sees them: packed, if they are packed."""
    decode: Callable[[Any], str]
    refused: Sequence[str] = ()
    """Why the run would not start."""


def data_of_run(file: Path) -> SeenData:
    """Returns what the run with this settings file trains on. Raises ValueError as the run does."""
    return _of_text(file) if "text" in read_yaml(file) else _of_tables(file)


def _of_text(file: Path) -> SeenData:
    settings = parse_settings(["--settings", str(file)])
    config, tokenizer = models.load_config(settings), models.load_tokenizer(settings)
    models.check_vocabulary(tokenizer, config)
    facts = {}
    for stage, of_stage in zip(settings.length_stages, settings.of_stages(), strict=True):
        found = rows_of_run(of_stage, tokenizer)
        documents = found.stream.document_lengths()
        facts[f"train, {stage}" if settings.stages else "train"] = _text_facts(found, documents)
        if stage.seq_len == settings.seq_len:
            rows = found
    evaluation = evaluation_rows(settings, tokenizer)
    if evaluation is not None:
        facts["eval"] = _text_facts(evaluation, evaluation.stream.document_lengths())
    each = [rows] if evaluation is None else [rows, evaluation]
    return SeenData(
        "finetune",
        "text",
        settings.seq_len,
        facts,
        documents,
        rows,
        tokenizer.decode,
        _refused([found.stream.losses for found in each], settings.allow_dropped),
    )


def _refused(each: Sequence[Losses], allowed: bool) -> list[str]:
    return [too_many(losses) for losses in each if losses.are_many and not allowed]


def _text_facts(rows: TextRows, documents: np.ndarray) -> Facts:
    facts = [
        ("documents", f"{len(documents):,}", f"{len(rows.stream):,} tokens"),
        ("rows", f"{len(rows):,}", f"{rows.num_tokens:,} tokens, {rows.efficiency:.1%} full"),
        _learned(rows.num_tokens - len(rows.pieces.starts), rows.num_tokens),
    ]
    for share in rows.shares:
        facts.append((share.source, f"{share.of_all:.1%}", share.tokens))
    facts += [*rows.left_out, *rows.stream.losses.facts()]
    if split := int((documents > rows.seq_len).sum()):
        facts.append(("split", f"{split:,}", "documents longer than a row"))
    return facts


def _of_tables(file: Path) -> SeenData:
    require_trl("dpo" if file.stem == "dpo" else "sft")
    from longctx_patch.recipes.trl_data import packed_rows, tables_of_run

    data = tables_of_run(file)
    facts, rows = {}, data.train
    for name, table, is_packed in (
        ("train", data.train, data.packs),
        ("eval", data.evaluation, data.packs_evaluation),
    ):
        if table is None:
            continue
        facts[name] = _table_facts(data, table)
        if name == "train":
            facts[name] += _shares(data)
        if is_packed:
            packed = packed_rows(table, data.args, name)
            facts[name].append(_packing(lengths_of(packed), data.reading.seq_len))
            rows = packed if name == "train" else rows
    reading = data.reading
    return SeenData(
        "dpo" if reading.kind == "preference" else "sft",
        reading.kind,
        reading.seq_len,
        facts,
        lengths_of(data.train),
        rows,
        reading.tokenizer.decode,
        _refused([*data.losses.values()], data.allows_dropped),
    )


def _table_facts(data: "RunData", table: Any) -> Facts:
    lengths = lengths_of(table)
    facts = [("rows", f"{len(table):,}", f"{int(lengths.sum()):,} tokens")]
    if data.reading.kind != "preference":
        name, number, share = _learned(_num_learned(table), int(lengths.sum()))
        if data.reading.assistant_only:
            share += f", {MARKED[data.reading.template.marks]}"
        facts.append((name, number, share))
    elif num_ties := _num_ties(table):
        facts.append(("no preference", f"{num_ties:,}", "pairs of equal answers teach nothing"))
    return facts + losses_of(table).facts()


def _shares(data: "RunData") -> Facts:
    """Returns what each of several sources has of the train table's tokens."""
    if len(data.sources) < 2:
        return []
    lengths, drawn = lengths_of(data.train), data.train._indices
    rows = np.arange(len(lengths)) if drawn is None else drawn.column(0).to_numpy()
    edges = np.cumsum([size for _, size in data.sources])
    owners = np.searchsorted(edges, rows, side="right")
    facts = []
    for number, (source, size) in enumerate(data.sources):
        mine = lengths[owners == number]
        of_all = mine.sum() / max(1, lengths.sum())
        times = len(mine) / max(1, size)
        share = Share(source, int(mine.sum()), of_all, size, times)
        facts.append((source, f"{share.of_all:.1%}", share.tokens))
    return facts


def _packing(lengths: np.ndarray, seq_len: int) -> tuple[str, str, str]:
    full = lengths.sum() / (len(lengths) * seq_len)
    return ("packed", f"{len(lengths):,}", f"rows, {full:.1%} full")


def _learned(number: int, tokens: int) -> tuple[str, str, str]:
    return ("learned", f"{number:,}", f"{number / max(1, tokens):.1%} of the tokens")


def _num_learned(table: Any) -> int:
    """Tokens that are predicted: labels, but for the first of each row."""
    total = 0
    for batch in table.with_format("arrow").iter(batch_size=1000):
        for labels in batch["labels"]:
            values = labels.values.to_numpy(zero_copy_only=False)
            total += int((values[1:] != IGNORE_INDEX).sum())
    return total


def _num_ties(table: Any) -> int:
    """Pairs whose answers are the same tokens. They have the same length, as few pairs do."""
    chosen, rejected = (column_lengths(table, f"{name}_ids") for name in ("chosen", "rejected"))
    alike = table.select(np.flatnonzero(chosen == rejected)).with_format("numpy")
    return sum(np.array_equal(pair["chosen_ids"], pair["rejected_ids"]) for pair in alike)


BARS = 40
"""Characters of the longest bar."""


def render(data: SeenData, file: Path) -> str:
    """The report, and the next command."""
    lines = [f"{file}: rows of {data.seq_len} tokens at most, of {data.kind}", ""]
    for name, facts in data.facts.items():
        lines += [f"{name}:", *(f"  {line}" for line in aligned(facts)), ""]
    lines += [f"The run will be refused: {why}\n" for why in data.refused]
    what = "document" if data.recipe == "finetune" else "row"
    lines += [f"tokens of a {what} (train):", *_histogram(data.lengths), ""]
    if not data.refused:
        lines.append(f"The run finds these rows made. {next_of(file)}".rstrip())
    return "\n".join(lines)


def _histogram(lengths: np.ndarray) -> list[str]:
    """Bars over lengths, each twice as long as the one before."""
    edges = [1]
    while edges[-1] <= lengths.max():
        edges.append(2 * edges[-1])
    counts, _ = np.histogram(lengths, bins=edges)
    first = int(np.flatnonzero(counts)[0])
    rows = [
        (f"{low:,} to {high - 1:,}", "#" * -(-BARS * int(count) // int(counts.max())), f"{count:,}")
        for low, high, count in list(zip(edges, edges[1:], counts, strict=False))[first:]
    ]
    middle = ", ".join(f"{p} %: {int(np.percentile(lengths, p)):,}" for p in (50, 90, 99))
    return [
        *(f"  {line}" for line in aligned(rows)),
        f"  so many per cent are no longer than: {middle}; longest {int(lengths.max()):,}",
    ]
