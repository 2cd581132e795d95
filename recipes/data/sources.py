"""Sources of training data, cut into parts that processes read side by side, record by record.

A source is a file (`.jsonl`, `.json`, `.csv`, `.parquet`, and any other as one text), a folder of
such files, a glob, a folder that `Dataset.save_to_disk` wrote, or the name of a dataset on the hub.
Records are read as Python objects: a table of `datasets` would fill the fields that a message lacks
with None, which chat templates then print.
"""

import csv
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longctx_patch.recipes.data.records import TEXT_FILE, BadRecord, Record

PART_BYTES = 64 * 2**20
"""Of a `.jsonl` file; a part ends with the line in which it has so many."""
PART_RECORDS = 10_000
"""Of a table."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HIDDEN = re.compile(r"(^|/)\.")

Reader = Literal["jsonl", "json", "csv", "parquet", "saved", "hub", "text"]
READERS: dict[str, Reader] = {
    **{".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
}


class Part(NamedTuple):
    """What one process reads in one go."""

    reader: Reader
    path: str
    start: int
    """First byte of a `.jsonl` file, first record of a table."""
    stop: int
    stamp: tuple[int, int]
    """Size and time of the last change, by which a cache notices another file."""


def parts_of(source: str) -> list[Part]:
    """The parts of a source, in order. Raises ValueError for a source that is not there."""
    path = Path(source).expanduser()
    if path.is_dir() and (
        (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    ):
        size = len(_saved(str(path)))
        stamp = _stamp(next(file for file in path.rglob("*.json")))
        return list(_pieces("saved", path, size, PART_RECORDS, stamp))
    files = _files_of(source, path)
    if not files and HUB_NAME.fullmatch(source):
        return [Part("hub", source, 0, 0, (0, 0))]
    if not files:
        raise ValueError(
            f"no data at {source!r}: it is no file, no folder with files, no glob that matches "
            "any, and no name of a dataset on the hub (OWNER/NAME). Relative paths are taken from "
            "the current directory."
        )
    return [part for file in files for part in _parts_of_file(file)]


def records_of(part: Part) -> Iterator[Record]:
    """The records of a part. Raises BadRecord for one that can't be read."""
    read = {
        "jsonl": _jsonl_records,
        "json": _json_records,
        "csv": _csv_records,
        "parquet": _parquet_records,
        "saved": _saved_records,
        "hub": _hub_records,
        "text": _text_records,
    }
    yield from read[part.reader](part)


def _files_of(source: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [f for f in path.rglob("*") if not HIDDEN.search(f.relative_to(path).as_posix())]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    return sorted(file for file in found if file.is_file())


def _parts_of_file(file: Path) -> Iterator[Part]:
    reader, stamp = READERS.get(file.suffix, "text"), _stamp(file)
    if reader == "jsonl":
        yield from _pieces(reader, file, stamp[0], PART_BYTES, stamp)
    elif reader == "parquet":
        yield from _pieces(reader, file, _parquet(str(file)).metadata.num_rows, PART_RECORDS, stamp)
    else:
        yield Part(reader, str(file), 0, stamp[0], stamp)


def _pieces(
    reader: Reader, path: Path, size: int, step: int, stamp: tuple[int, int]
) -> Iterator[Part]:
    for start in range(0, size, step):
        yield Part(reader, str(path), start, min(start + step, size), stamp)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


class Line(NamedTuple):
    """The place of a line: counted when it is printed, since few are."""

    path: str
    start: int
    """Its first byte."""

    def __str__(self) -> str:
        number = 1
        with open(self.path, "rb") as file:
            while left := self.start - file.tell():
                number += file.read(min(left, PART_BYTES)).count(b"\n")
        return f"{self.path}, line {number}"


def _jsonl_records(part: Part) -> Iterator[Record]:
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that the part before this one ends with
        while (start := file.tell()) < part.stop and (line := file.readline()):
            if line.strip():
                yield _parsed(line, Line(part.path, start))


def _parsed(line: bytes, place: Line) -> Record:
    try:
        found = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRecord(f"{place}: not UTF-8 text ({error.reason}).") from error
    except (json.JSONDecodeError, RecursionError) as error:
        cut = (
            "" if line.endswith(b"\n") else " The file may be cut short: its last line has no end."
        )
        raise BadRecord(f"{place}: no JSON ({error}).{cut}") from error
    return _object(found, place)


def _json_records(part: Part) -> Iterator[Record]:
    try:
        found = json.loads(Path(part.path).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadRecord(
            f"{part.path}: no JSON ({error}). Give one object per line a name ending in .jsonl."
        ) from error
    for number, record in enumerate(found if isinstance(found, list) else [found], start=1):
        yield _object(record, f"{part.path}, record {number}")


def _object(found: Any, place: Line | str) -> Record:
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise BadRecord(f"{place}: a {kind}, not an object with named fields.")
    return Record(found, place)


def _csv_records(part: Part) -> Iterator[Record]:
    with open(part.path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for record in rows:
                place = f"{part.path}, line {rows.line_num}"
                if None in record or None in record.values():
                    raise BadRecord(f"{place}: not as many fields as the first line has names.")
                yield Record(record, place)
        except (UnicodeDecodeError, csv.Error) as error:
            place = f"{part.path}, after line {rows.line_num}"
            raise BadRecord(f"{place}: no CSV in UTF-8 ({error}).") from error


def _parquet_records(part: Part) -> Iterator[Record]:
    table, number = _parquet(part.path), 0
    for batch in table.iter_batches(batch_size=1000):
        if number + len(batch) <= part.start:
            number += len(batch)
            continue
        for fields in batch.to_pylist():
            if part.start <= number < part.stop:
                yield Record(without_none(fields), f"{part.path}, record {number + 1}")
            number += 1
        if number >= part.stop:
            return


def _parquet(path: str) -> Any:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        return ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadRecord(f"{path}: no parquet file, or one cut short ({error}).") from error


def _saved_records(part: Part) -> Iterator[Record]:
    found = _saved(part.path)
    for number in range(part.start, part.stop):
        yield Record(without_none(found[number]), f"{part.path}, record {number + 1}")


def _saved(path: str) -> Any:
    from datasets import load_from_disk

    return _train_split(load_from_disk(path), path)


def _hub_records(part: Part) -> Iterator[Record]:
    from datasets import load_dataset

    try:
        found = _train_split(load_dataset(part.path, streaming=True), part.path)
    except (OSError, ValueError) as error:
        raise BadRecord(
            f"{part.path}: no file or folder here, and no dataset that the hub gives "
            f"({' '.join(str(error).split())[:300]})."
        ) from error
    for number, fields in enumerate(found, start=1):
        yield Record(without_none(fields), f"{part.path}, record {number}")


def _train_split(found: Any, path: str) -> Any:
    if not isinstance(found, dict):
        return found
    if "train" not in found:
        raise BadRecord(f"{path} has the splits {', '.join(found)}: one named train is needed.")
    return found["train"]


def _text_records(part: Part) -> Iterator[Record]:
    try:
        text = Path(part.path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"{part.path} is not UTF-8 text ({error.reason} at byte {error.start}). Leave it out, "
            "for example with a glob: 'folder/**/*.txt'"
        ) from error
    if text:
        yield Record({TEXT_FILE: text}, part.path)


def without_none(value: Any) -> Any:
    """A table's record without the fields that only other records of its table have."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_none(each) for each in value]
    return value
