"""Rows of tokens in a memory-mapped table on disk, made once on each machine.

`datasets` writes the table into its cache by several processes and maps it into memory; whoever
asks for the same rows again, other processes of this run or later ones, gets the file that is
there. While it is written, the others wait at a file's lock, not at a collective.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets.config
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import (
    ArrowBasedBuilder,
    BuilderConfig,
    Dataset,
    DatasetInfo,
    Features,
    IterableDataset,
    List,
    SplitGenerator,
    Value,
    interleave_datasets,
)
from datasets.config import DATASET_INFO_FILENAME
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock

from longctx_patch.hf.sharing import LEAST_SAVED
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.readers import Part, records_of
from longctx_patch.recipes.data.records import BadRecord, NoRecords, Record
from longctx_patch.recipes.data.sealed import SEAL, seal, sealed, what_changed
from longctx_patch.recipes.data.sources import check_unchanged, parts_of

FORMAT = 3
"""Goes up when the same records and settings give other rows than before."""
MOST_PROCESSES = 64
_LOSSES = "losses-"
CHUNK_ROWS, CHUNK_TOKENS = 1000, 2**20
"""A chunk of the table, which its writer holds in memory, ends with the row that has so many."""

Row = Mapping[str, Any]


class RowReading(Protocol):
    """Says how records become rows: a frozen dataclass."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def columns(self) -> dict[str, str]:
        """Types of a row's fields: `tokens` (ids or labels), or one of numpy's."""

    def rows_of(self, records: Iterable[Record], losses: Losses) -> Iterator[Row]:
        """The rows of records, in order; `losses` counts what is in none. Raises BadRecord."""


def table_of(source: str, reading: RowReading, *, num_proc: int = 1) -> Dataset:
    """The rows of one source, in order.

    A table that was made before and is no longer what was written is made anew, which is printed.

    Raises:
        BadRecord: a record can't be trained on.
        NoRecords: the source has none.
        ValueError: it is not there.
    """
    parts = parts_of(source)
    num_proc = max(1, min(num_proc, len(parts), MOST_PROCESSES))
    key = fingerprint(parts, reading)
    _remove_changed(_folder_of(key), source)
    try:
        builder = _Builder(config_id=f"rows-{key}", parts=parts, reading=reading)
        builder.download_and_prepare(num_proc=num_proc if num_proc > 1 else None)
        check_unchanged(parts)
        table = builder.as_dataset(split="train")
    except (DatasetGenerationError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise _no_rows(source, _losses_in(Path(builder.cache_dir))) from None
        raise _reason(error) from None
    table._fingerprint = key
    return table


def losses_of(table: Any) -> Losses:
    """Counts the records that are in no row of a table, or of one that is made of several."""
    files = getattr(table, "cache_files", ())
    folders = {Path(found["filename"]).parent: None for found in files}
    return Losses.joined(_losses_in(folder) for folder in folders if (folder / SEAL).is_file())


def _losses_in(folder: Path) -> Losses:
    return Losses.from_json(sealed(folder)["losses"])


def _no_rows(source: str, losses: Losses) -> NoRecords:
    if not losses.num_records:
        return NoRecords(f"no data in {source!r}: its files hold no records.", losses)
    said = f"all its {losses.num_records:,} records are left out: {losses.reasons}"
    return NoRecords(f"no data in {source!r}: {said}. Give longer rows, or other data.", losses)


def _folder_of(key: str) -> Path:
    """Returns where `datasets` keeps a table."""
    return Path(datasets.config.HF_DATASETS_CACHE, __name__.rpartition(".")[2], f"rows-{key}")


def _remove_changed(folder: Path, source: str) -> None:
    """Remove a table that is no longer what was written; one process of the machine does it."""
    for table in folder.glob("*"):
        if not table.is_dir() or table.suffix == ".incomplete" or not what_changed(table):
            continue
        with FileLock(f"{folder}.lock"):
            if table.is_dir() and (why := what_changed(table)):
                print(
                    f"{source}: the cached table was changed ({why}); it is made anew", flush=True
                )
                shutil.rmtree(table)


@dataclass
class _Config(BuilderConfig):
    parts: Sequence[Part] = ()
    reading: Any = None


class _Builder(ArrowBasedBuilder):
    """Writes rows by chunks of arrays: as Python's numbers they would take ten times the memory."""

    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=_features(self.config.reading))

    def _split_generators(self, _: Any) -> list[SplitGenerator]:
        given = {"parts": list(self.config.parts), "reading": self.config.reading}
        return [SplitGenerator(name="train", gen_kwargs=given)]

    def _generate_tables(
        self, parts: Sequence[Part], reading: RowReading
    ) -> Iterator[tuple[int, pa.Table]]:
        losses = Losses()
        yield from enumerate(chunks_of(rows_of_parts(parts, reading, losses), reading.columns))
        place = self.config.parts.index(parts[0]) if parts else 0
        file = Path(self._output_dir, f"{_LOSSES}{place:08}.json")
        file.write_text(json.dumps(losses.as_json()), encoding="utf-8")

    def _save_info(self) -> None:
        """Seals the table before it gets its name; what each process has lost is joined."""
        super()._save_info()
        folder = Path(self._output_dir)
        files = sorted(folder.glob(f"{_LOSSES}*"))
        losses = Losses.joined(Losses.from_json(json.loads(file.read_bytes())) for file in files)
        for file in files:
            file.unlink()
        files = [*sorted(folder.glob("*.arrow")), folder / DATASET_INFO_FILENAME]
        seal(folder, files, losses=losses.as_json())


def chunks_of(rows: Iterator[Row], columns: Mapping[str, str]) -> Iterator[pa.Table]:
    """The rows as tables, each of two rows or more, but for the last."""
    held: list[Row] = []
    num_tokens = 0
    for row in rows:
        arrays = {name: _array(row[name], kind) for name, kind in columns.items()}
        num_tokens += sum(array.size for array in arrays.values())
        held.append(arrays)
        # A table of one row would wait in the builder's own list for a thousand others.
        if len(held) == CHUNK_ROWS or (len(held) > 1 and num_tokens >= CHUNK_TOKENS):
            yield _chunk(held, columns)
            held, num_tokens = [], 0
    if held:
        yield _chunk(held, columns)


def _array(value: Any, kind: str) -> np.ndarray:
    return np.asarray(value, np.int32 if kind == "tokens" else kind)


def _chunk(rows: Sequence[Row], columns: Mapping[str, str]) -> pa.Table:
    return pa.table({name: _column([r[name] for r in rows], columns[name]) for name in columns})


def _column(values: Sequence[np.ndarray], kind: str) -> pa.Array:
    if kind != "tokens":
        return pa.array(np.stack(values))
    edges = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.ListArray.from_arrays(edges, np.concatenate(values))


def stream_of(source: str, reading: RowReading, losses: Losses) -> IterableDataset:
    """The same rows, made while they are read."""
    return IterableDataset.from_generator(
        rows_of_parts,
        features=_features(reading),
        gen_kwargs={"parts": parts_of(source), "reading": reading, "losses": losses},
    )


def rows_of_parts(parts: Sequence[Part], reading: RowReading, losses: Losses) -> Iterator[Row]:
    records = (record for part in parts for record in records_of(part))
    yield from reading.rows_of(records, losses)


def mixed(tables: Sequence[Dataset], shares: Sequence[float], *, seed: int) -> Dataset:
    """Rows of all tables, drawn so that each has its share of all tokens.

    Rows of a table are taken in order, and over again until each table has been taken once.
    `shares`: numbers above 0, which need not add up to 1.
    """
    per_row = [
        share / lengths_of(table).mean() for table, share in zip(tables, shares, strict=True)
    ]
    return interleave_datasets(
        list(tables),
        probabilities=[part / sum(per_row) for part in per_row],
        seed=seed,
        stopping_strategy="all_exhausted",
    )


def lengths_of(table: Dataset) -> np.ndarray:
    """Tokens of each row, int64: read from the table's offsets, not from its tokens."""
    total = np.zeros(len(table), np.int64)
    for name in table.column_names:
        if name.endswith("_ids"):
            total += column_lengths(table, name)
    return total


def longest_row_first(table: Dataset, *, shares: bool) -> np.ndarray:
    """The numbers of all rows, by the tokens that the model reads of each: of a pair those of the
    prompt and the longer answer twice, as the shorter one is padded; or the prompt and both answers
    once, if it `shares` what its rows begin with and that pays."""
    if "chosen_ids" in table.column_names:
        prompt, *answers = (
            column_lengths(table, f"{name}_ids") for name in ("prompt", "chosen", "rejected")
        )
        apart, once = 2 * (prompt + np.maximum(*answers)), prompt + sum(answers)
        lengths = np.where(shares & (once < (1 - LEAST_SAVED) * apart), once, apart)
    else:
        lengths = column_lengths(table, "input_ids")
    return np.argsort(-lengths, kind="stable")


def column_lengths(table: Dataset, name: str) -> np.ndarray:
    """Tokens of one column in each row, int64."""
    chunks = table.data.column(name).chunks
    found = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    if table._indices is not None:  # of rows that were drawn or shuffled
        found = found[table._indices.column(0).to_numpy()]
    return found.astype(np.int64)


def fingerprint(parts: Sequence[Part], reading: RowReading) -> str:
    """Equal for equal files, settings and tokenizers."""
    tokenizer = reading.tokenizer
    names = [field.name for field in dataclasses.fields(reading)]  # type: ignore[arg-type]
    settings = {name: getattr(reading, name) for name in names if name != "tokenizer"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    content = [
        FORMAT,
        type(reading).__name__,
        parts,
        settings,
        words,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:32]


def _features(reading: RowReading) -> Features:
    kinds = reading.columns.items()
    return Features({n: List(Value("int32")) if k == "tokens" else Value(k) for n, k in kinds})


def _reason(error: BaseException) -> ValueError:
    """Returns what a reading process has raised; of another process the text of its trace."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, BadRecord):
            return found
        if told := re.search(r"\.BadRecord: (.*?)\n\n", str(found), re.DOTALL):
            return BadRecord(told[1])
        found = found.__cause__ or found.__context__
    return ValueError(f"the data can't be read: {error.__cause__ or error}")
