"""Rows of tokens in a memory-mapped table on disk, made once on each machine.

`datasets` writes the table into its cache by several processes and maps it into memory; whoever
asks for the same rows again, other processes of this run or later ones, gets the file that is
there. While it is written, the others wait at a file's lock, not at a collective.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, interleave_datasets
from datasets.exceptions import DatasetGenerationError

from longctx_patch.recipes.data.reading import Reading, Row
from longctx_patch.recipes.data.records import BadRecord
from longctx_patch.recipes.data.sources import Part, parts_of, records_of

FORMAT = 1
"""Goes up when the same records and settings give other rows than before."""
MOST_PROCESSES = 64


@dataclass(frozen=True)
class Source:
    """Where rows come from."""

    name: str
    """A file, folder, glob, or dataset of the hub."""
    share: float | None = None
    """Its part of all tokens; None: all of its rows once."""


def table_of(source: str, reading: Reading, *, num_proc: int = 1) -> Dataset:
    """The rows of one source, in order.

    Raises:
        BadRecord: a record can't be trained on.
        ValueError: the source is not there, or has no record.
    """
    parts = parts_of(source)
    num_proc = max(1, min(num_proc, len(parts), MOST_PROCESSES))
    try:
        table = Dataset.from_generator(
            rows_of_parts,
            features=_features(reading),
            gen_kwargs={"parts": parts, "reading": reading},
            num_proc=num_proc if num_proc > 1 else None,
            fingerprint=fingerprint(parts, reading),
        )
    except (DatasetGenerationError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"no data in {source!r}: its files hold no records.") from None
        raise _reason(error) from None
    return table


def stream_of(source: str, reading: Reading) -> IterableDataset:
    """The same rows, made while they are read."""
    return IterableDataset.from_generator(
        rows_of_parts,
        features=_features(reading),
        gen_kwargs={"parts": parts_of(source), "reading": reading},
    )


def rows_of_parts(parts: Sequence[Part], reading: Reading) -> Iterator[Row]:
    for part in parts:
        for record in records_of(part):
            yield from reading.rows(record)


def mixed(tables: Sequence[Dataset], shares: Sequence[float], *, seed: int) -> Dataset:
    """Rows of all tables, drawn so that each has its share of all tokens.

    Rows of a table are taken in order, and over again until each table has been taken once.
    `shares`: numbers above 0, which need not add up to 1.
    """
    per_row = [share / _mean_length(table) for table, share in zip(tables, shares, strict=True)]
    return interleave_datasets(
        list(tables),
        probabilities=[part / sum(per_row) for part in per_row],
        seed=seed,
        stopping_strategy="all_exhausted",
    )


def lengths_of(table: Dataset) -> np.ndarray:
    """Tokens of each row, int64: read from the table's offsets, not from its tokens."""
    total = np.zeros(table.data.num_rows, np.int64)
    for name in table.column_names:
        if name.endswith("_ids"):
            chunks = table.data.column(name).chunks
            total += np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    if table._indices is None:
        return total
    return total[table._indices.column(0).to_numpy()]  # of rows that were drawn or shuffled


def fingerprint(parts: Sequence[Part], reading: Reading) -> str:
    """Equal for equal files, settings and tokenizers."""
    tokenizer = reading.tokenizer
    settings = {name: value for name, value in vars(reading).items() if name in _SETTINGS}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    content = [
        FORMAT,
        parts,
        settings,
        words,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:32]


_SETTINGS = frozenset(Reading.__dataclass_fields__) - {"tokenizer"}


def _features(reading: Reading) -> Features:
    names: tuple[str, ...] = ("input_ids", "labels")
    if reading.kind == "preference":
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Features({**{name: List(Value("int32")) for name in names}, "num_cut": Value("int64")})


def _mean_length(table: Dataset) -> float:
    return float(lengths_of(table).mean())


def _reason(error: BaseException) -> ValueError:
    """What a process that reads has raised; of another process there is the text of its trace."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, BadRecord):
            return found
        if told := re.search(r"\.BadRecord: (.*?)\n\n", str(found), re.DOTALL):
            return BadRecord(told[1])
        found = found.__cause__ or found.__context__
    return ValueError(f"the data can't be read: {error.__cause__ or error}")
