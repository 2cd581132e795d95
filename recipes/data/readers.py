"""Records of a part of a source, one reader for each kind of file.

Records are read as Python objects: a table of `datasets` would fill the fields that a message lacks
with None, which chat templates then print.
"""

import codecs
import csv
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longctx_patch.recipes.data.addresses import chosen_split
from longctx_patch.recipes.data.records import TEXT_FILE, BadRecord, Record, named, unreadable
from longctx_patch.rules import strict_json

Reader = Literal["jsonl", "json", "csv", "parquet", "arrow", "saved", "hub", "text"]
BATCH_RECORDS = 1000
"""Records of a table that are Python objects at a time."""
BLOCK_BYTES = 2**20
MOST_BYTES = 2**31
"""A file that is read whole, .json or a text, may have so many."""
MOST_LINE_BYTES = 2**28
"""A line of a .jsonl file may have so many: it takes about 6 times as much while it is read."""


class Part(NamedTuple):
    """Names what one process reads in one go."""

    reader: Reader
    path: str
    start: int
    """First byte of a `.jsonl` file, first record of a table."""
    stop: int
    stamp: tuple[int | str, ...]
    """By which a cache notices other content: a file's size and the time of its last change, or the
    commit of a dataset on the hub."""
    split: str = ""
    """The split of a saved dataset or one on the hub; empty for a table without splits."""
    config: str = ""
    """The configuration of a dataset on the hub; empty for its only one."""


ZERO_BYTE = "a byte 0x00, which no text has: the file is binary, or was damaged."
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def not_utf8(path: str) -> str:
    """The refusal, with the first byte that is wrong. The file is read up to there."""
    with open(path, "rb") as file:
        wide = file.read(2) in UTF_16
        file.seek(0)
        line, offset, byte = _first_wrong(file)
    name, encoding = ("UTF-16", "utf-16") if wide else ("Latin-1", "latin1")
    return (
        f"{path}, line {line}: not UTF-8 text: byte 0x{byte:02x} at offset {offset} of the file. "
        f"If it is {name}, write it anew: iconv -f {encoding} -t utf-8 {shlex.quote(path)} > "
        "NEW_FILE"
    )


def _first_wrong(lines: Iterable[bytes]) -> tuple[int, int, int]:
    """(line, offset, byte) of the first byte that can't be decoded."""
    start = 0
    for number, line in enumerate(lines, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return number, start + error.start, line[error.start]
        start += len(line)
    raise ValueError("the file was changed while it was read")


def records_of(part: Part) -> Iterator[Record]:
    """The records of a part. Raises BadRecord for one that can't be read."""
    read = {
        "jsonl": _jsonl_records,
        "json": _json_records,
        "csv": _csv_records,
        "parquet": _parquet_records,
        "arrow": _arrow_records,
        "saved": _saved_records,
        "hub": _hub_records,
        "text": _text_records,
    }
    try:
        yield from read[part.reader](part)
    except OSError as error:
        raise BadRecord(unreadable(part.path, error)) from error


class Line(NamedTuple):
    """The place of a line: counted when it is printed, since few are."""

    path: str
    start: int
    """Its first byte."""

    def __str__(self) -> str:
        number = 1
        with open(self.path, "rb") as file:
            while left := self.start - file.tell():
                number += file.read(min(left, BLOCK_BYTES)).count(b"\n")
        return f"{self.path}, line {number}"


def _jsonl_records(part: Part) -> Iterator[Record]:
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that the part before this one ends with
        while (start := file.tell()) < part.stop and (line := file.readline(MOST_LINE_BYTES + 1)):
            if len(line) > MOST_LINE_BYTES:
                raise BadRecord(
                    f"{Line(part.path, start)}: it has more than {MOST_LINE_BYTES:,} bytes (the "
                    f"file has {part.stamp[0]:,}), and a line is read whole. Split the record; or "
                    "give a long text a .txt file of its own."
                )
            if line.strip():
                yield _parsed(line, Line(part.path, start))


def _parsed(line: bytes, place: Line) -> Record:
    try:
        found = strict_json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(not_utf8(place.path)) from error
    except ValueError as error:
        cut = (
            "" if line.endswith(b"\n") else " The file may be cut short: its last line has no end."
        )
        raise BadRecord(
            f"{place}: no JSON ({error}). Each line of a .jsonl file is one object.{cut}"
        ) from error
    return _object(found, place)


def _json_records(part: Part) -> Iterator[Record]:
    text = _text_of(part.path)
    try:
        found = strict_json.loads(text)
    except ValueError as error:
        raise BadRecord(
            f"{part.path}: no JSON ({error}). Give one object per line a name ending in .jsonl."
        ) from error
    for number, record in enumerate(found if isinstance(found, list) else [found], start=1):
        yield _object(record, f"{part.path}, record {number}")


def _text_of(path: str) -> str:
    """All of a file's text, without a byte order mark. Raises BadRecord for other bytes, and for
    more of them than fit into memory beside what is made of them."""
    size = Path(path).stat().st_size
    if size > MOST_BYTES:
        raise BadRecord(
            f"{path} has {size:,} bytes, and a file of its kind is read whole, up to "
            f"{MOST_BYTES:,}. Write it as .jsonl, one record on each line, which is read in parts."
        )
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecord(not_utf8(path)) from error


def _object(found: Any, place: Line | str) -> Record:
    if not isinstance(found, dict):
        kind = "null" if found is None else f"a {type(found).__name__}"
        raise BadRecord(f"{place}: {kind}, not an object with named fields.")
    return Record(found, place)


def _csv_records(part: Part) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # long texts are fields too
    with open(part.path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            yield from _csv_rows(rows, part.path)
        except UnicodeDecodeError as error:
            raise BadRecord(not_utf8(part.path)) from error
        except csv.Error as error:
            place = f"{part.path}, after line {rows.line_num}"
            raise BadRecord(f"{place}: no CSV ({error}).") from error


def _csv_rows(rows: "csv.DictReader[str]", path: str) -> Iterator[Record]:
    names = list(rows.fieldnames or ())
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadRecord(f"{path}, line 1: the field {twice[0]!r} is named twice.")
    for record in rows:
        place = f"{path}, line {rows.line_num}"
        if None in record or None in record.values():
            raise BadRecord(f"{place}: not as many fields as the first line has names.")
        yield Record(record, place)


def _parquet_records(part: Part) -> Iterator[Record]:
    file, first = open_parquet(part.path), 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if first < part.stop and first + size > part.start:
            number = first
            for batch in file.iter_batches(batch_size=BATCH_RECORDS, row_groups=[group]):
                start, stop = (max(0, place - number) for place in (part.start, part.stop))
                yield from _records(part, batch[start:stop].to_pylist(), number + start)
                number += len(batch)
        first += size


def open_parquet(path: str) -> Any:
    """The file, of which nothing is read yet. Raises BadRecord for one that is none."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        return ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadRecord(f"{path}: no parquet file, or one cut short ({error}).") from error


def _arrow_records(part: Part) -> Iterator[Record]:
    table = open_arrow(part.path)
    for start in range(part.start, part.stop, BATCH_RECORDS):
        batch = table[start : min(part.stop, start + BATCH_RECORDS)]
        yield from _records(part, batch.to_pylist(), start)


def _saved_records(part: Part) -> Iterator[Record]:
    found = open_saved(part.path, part.split)
    yield from _records(part, (found[n] for n in range(part.start, part.stop)), part.start)


def open_arrow(path: str) -> Any:
    """The table in an arrow file of either form, mapped. Raises BadRecord for one that is none."""
    import pyarrow

    try:
        mapped = pyarrow.memory_map(path)
        try:
            return pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(mapped).read_all()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadRecord(f"{path}: no arrow file, or one cut short ({error}).") from error


def _records(part: Part, records: Iterable[Mapping[str, Any]], first: int = 0) -> Iterator[Record]:
    """Records of a table, within whose fields nothing is that only other records of it have."""
    for number, fields in enumerate(records, start=first + 1):
        found = {name: _dropped(value) for name, value in fields.items()}
        yield Record(found, f"{part.path}, record {number}")


def saved_splits(path: str) -> Sequence[str]:
    """The splits of a saved dataset; none for one table."""
    file = Path(path) / "dataset_dict.json"
    return list(strict_json.loads(file.read_text())["splits"]) if file.is_file() else []


def open_saved(path: str, split: str = "") -> Any:
    """A table of a saved dataset, mapped."""
    from datasets import load_from_disk

    return load_from_disk(str(Path(path) / split))


def _hub_records(part: Part) -> Iterator[Record]:
    from datasets import load_dataset

    revision = str(part.stamp[0]) or None
    try:
        found = load_dataset(part.path, part.config or None, revision=revision, streaming=True)
    except (OSError, ValueError) as error:
        why = named(part.path, " ".join(str(error).split())[:300])
        raise BadRecord(
            f"no file or folder here, and no dataset that the hub gives: {why} (One of several "
            f"configs is named so: {part.path}:CONFIG/SPLIT.)"
        ) from error
    table = found[chosen_split(list(found), part.split, part.path)]
    yield from _records(part, table)


def _text_records(part: Part) -> Iterator[Record]:
    text = _text_of(part.path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadRecord(f"{part.path}, line {line}: {ZERO_BYTE}")
    yield Record({TEXT_FILE: text}, part.path)


def _dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dropped(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_dropped(each) for each in value]
    return value
