"""Makes rows of tokens from text, and says which of them each step takes.

Everything here is a pure function of the files and the settings: every process computes the same
rows, and the rows of a step follow from its number alone, so that a run can resume at any step.
All tokens are held in memory, 4 bytes each.
"""

import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, list[int]]

TABLE_FILES = {".parquet": "parquet", ".arrow": "arrow"}
"""Endings of table files, and the builder of the package datasets that reads each."""
CHAT_FIELDS = ("messages", "conversations", "conversation")

NO_TEXT = "no text found: the sources of text hold only empty documents."


def read_documents(sources: Sequence[str], text_field: str) -> Iterator[str]:
    """The documents of all sources in order: sources as given, files of a folder or glob sorted.

    A source is a file (text, `.jsonl`, or `.parquet` and `.arrow`, which the package datasets
    reads), a folder of such files (searched recursively), a glob, or a datasets folder
    (`load_from_disk`, or `load_dataset` of a local path with a `train` split).

    Raises ValueError where a source matches nothing or a record has no text.
    """
    for source in sources:
        path = Path(source)
        if path.is_dir() and _is_dataset(path):
            yield from _dataset_documents(path, text_field)
            continue
        for file in _files_of(source):
            if file.suffix == ".jsonl":
                yield from _jsonl_documents(file, text_field)
            elif file.suffix in TABLE_FILES:
                yield from _dataset_documents(file, text_field)
            elif text := _read_text(file):
                yield text


def token_rows(
    documents: Iterable[str], tokenizer: Any, *, seq_len: int, one_document_per_row: bool
) -> list[np.ndarray]:
    """Cut documents into int32 rows of tokens, each document closed by the eos token.

    By default rows are cut from the joined stream, all exactly `seq_len` long; an incomplete last
    row is dropped. With `one_document_per_row` a row holds tokens of one document: a longer one
    gives several rows, and the last row of each may be shorter (2 tokens at least).

    Raises ValueError without any text, or with less than one row of it.
    """
    streams = [tokens_of(document, tokenizer) for document in documents]
    if not streams:
        raise ValueError(NO_TEXT)
    if not one_document_per_row:
        streams = [np.concatenate(streams)]
    shortest = 2 if one_document_per_row else seq_len
    rows = [
        row
        for stream in streams
        for row in np.split(stream, range(seq_len, len(stream), seq_len))
        if len(row) >= shortest
    ]
    if not rows:
        count = sum(map(len, streams))
        raise ValueError(
            f"the text has {count} tokens, less than one row of seq_len={seq_len}. Give more text, "
            "a shorter --seq-len, or --pack or --one-document-per-row, which pad."
        )
    return rows


def digest(rows: Sequence[np.ndarray], seq_lengths: Sequence[Sequence[int]] | None = None) -> str:
    """A short fingerprint of the rows, equal for equal tokens in equal rows and documents."""
    content = hashlib.sha256()
    for row in rows:
        content.update(len(row).to_bytes(8, "little"))
        content.update(row.tobytes())
    for lengths in seq_lengths or ():
        content.update(np.array([len(lengths), *lengths], dtype=np.int64).tobytes())
    return content.hexdigest()[:16]


@dataclass(kw_only=True)
class RowOrder:
    """Which rows each replica takes in each forward: shuffled anew in every pass over the data.

    A step takes the next `replicas * batch_size * accumulation` rows of one endless sequence, so
    two worlds with the same product train on the same rows in every step. `seq_lengths` are the
    lengths of the documents in each row, if rows are packed.
    """

    rows: Sequence[np.ndarray]
    seq_lengths: Sequence[list[int]] | None = None
    replicas: int
    batch_size: int
    accumulation: int
    seed: int
    _shuffled: tuple[int, np.ndarray] | None = field(default=None, init=False)

    @property
    def rows_per_step(self) -> int:
        return self.replicas * self.batch_size * self.accumulation

    def micro_batches(self, step: int, replica: int) -> list[list[Row]]:
        """Rows of `replica` in `step` (from 0), one list per forward."""
        batches = []
        for micro in range(self.accumulation):
            first = step * self.rows_per_step
            first += (micro * self.replicas + replica) * self.batch_size
            indices = [self._row_index(first + offset) for offset in range(self.batch_size)]
            batches.append([self._row(index) for index in indices])
        return batches

    def _row(self, index: int) -> Row:
        row = {"input_ids": self.rows[index].tolist()}
        return row if self.seq_lengths is None else {**row, "seq_lengths": self.seq_lengths[index]}

    def _row_index(self, position: int) -> int:
        epoch, within = divmod(position, len(self.rows))
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._shuffled = (epoch, generator.permutation(len(self.rows)))
        return int(self._shuffled[1][within])


def tokens_of(document: str, tokenizer: Any) -> np.ndarray:
    """int32 tokens of a document and the eos token."""
    ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def _files_of(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        hidden = re.compile(r"(^|/)\.")
        files = [f for f in path.rglob("*") if not hidden.search(f.relative_to(path).as_posix())]
    else:
        files = [Path(name) for name in glob.glob(source, recursive=True)]
    files = sorted(file for file in files if file.is_file())
    if not files:
        raise ValueError(
            f"no text found: {source!r} is no file, no folder with files and no glob that matches "
            "any. Relative paths are taken from the current directory."
        )
    return files


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}). Leave it out, for "
            "example with a glob: --text 'folder/**/*.txt'"
        ) from error


def _jsonl_documents(file: Path, text_field: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield from _text_of(json.loads(line), text_field, f"{file}, line {number}")


def _text_of(record: Any, text_field: str, place: str) -> Iterator[str]:
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise ValueError(f"{place}: {_why_no_text(record, text_field)}")
    if record[text_field]:
        yield record[text_field]


def _why_no_text(record: Any, text_field: str) -> str:
    if not isinstance(record, dict):
        return f"a {type(record).__name__}, not an object with the field {text_field!r}."
    found = f"no text in field {text_field!r}, there is: {', '.join(record)}."
    if {*CHAT_FIELDS, "input_ids", "prompt", "chosen"} & record.keys():
        return (
            f"{found} This recipe trains on plain text. Conversations, completions, pairs and rows "
            "of tokens are for longctx_patch.recipes.sft and .dpo, whose run folder `longctx patch "
            "--data` writes."
        )
    texts = [name for name, value in record.items() if isinstance(value, str)]
    if not texts:
        return f"{found} None of them holds text. Give records with a field of text."
    return f"{found} Give --text-field NAME, for example --text-field {texts[0]}."


def _is_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder, or it holds tables, which `load_dataset` reads."""
    saved = (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()
    return saved or any(folder.rglob("*.parquet")) or any(folder.rglob("*.arrow"))


def _dataset_documents(path: Path, text_field: str) -> Iterator[str]:
    for number, record in enumerate(_load_dataset(path)):
        yield from _text_of(record, text_field, f"{path}, record {number}")


def _load_dataset(path: Path) -> Any:
    """The records of a dataset's folder or of one of its files; none is copied to a cache."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{path} is a dataset, which needs the package datasets: pip install datasets"
        ) from error
    if path.is_file():
        kind = TABLE_FILES[path.suffix]
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
    else:
        loaded = datasets.load_dataset(str(path), streaming=True)
    if not isinstance(loaded, dict):
        return loaded
    if "train" not in loaded:
        raise ValueError(f"{path} has splits {', '.join(loaded)}: one named train is needed.")
    return loaded["train"]
