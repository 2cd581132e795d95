"""Sources of training data, cut into parts that processes read side by side.

A source is a file (`kinds.py` says of which kinds), a folder of such files, a glob, a folder that
`Dataset.save_to_disk` wrote, or the name of a dataset on the hub. Of a folder with parquet or arrow
files, `datasets` says which are for training.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from yaml import YAMLError

from longctx_patch.recipes.data.kinds import READERS, TABLE_FILES, reader_of
from longctx_patch.recipes.data.readers import Part, Reader, open_arrow, open_parquet, open_saved
from longctx_patch.recipes.data.records import BadRecord, unreadable

PART_BYTES = 64 * 2**20
"""Of a `.jsonl` file; a part ends with the line in which it has so many."""
PART_RECORDS = 10_000
"""Of a table."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_NAME = re.compile(
    r".*\.(jsonl|ndjson|jsonlines|json|csv|tsv|parquet|arrow|txt|md|gz|zst|zip)", re.IGNORECASE
)
HIDDEN = re.compile(r"(^|/)\.")
ABOUT = re.compile(
    r"(readme|license|licence|notice|citation|requirements|dataset_infos?)\b.*", re.I
)
"""Files that lie beside the tables of a dataset and say something of it."""


def parts_of(source: str) -> list[Part]:
    """The parts of a source, in order. Raises ValueError for a source that is not there, or can't
    be opened."""
    try:
        return _parts_of(source)
    except OSError as error:
        raise BadRecord(unreadable(source, error)) from error


def check_unchanged(parts: Sequence[Part]) -> None:
    """Raise ValueError for a file that another process has written to since its parts were made."""
    stamps = {part.path: part.stamp for part in parts if part.reader not in ("hub", "saved")}
    for path, stamp in stamps.items():
        if not os.path.isfile(path) or _stamp(Path(path)) != stamp:
            raise BadRecord(f"{path} was changed while it was read. Start again once it is whole.")


def check_apart(output: str | Path, sources: Sequence[str]) -> None:
    """Raise ValueError for an output within a folder of data, whose files would become data."""
    for source in sources:
        folder, written = Path(source).expanduser().resolve(), Path(output).expanduser().resolve()
        if not folder.is_dir() or not written.is_relative_to(folder):
            continue
        if not any(part.startswith(".") for part in written.relative_to(folder).parts):
            raise ValueError(
                f"the output {written} lies in {source}, which is read as data: a later start "
                "would train on what the run has written. Give an output beside it, or a glob of "
                "the files that are meant."
            )


def _parts_of(source: str) -> list[Part]:
    path = Path(source).expanduser()
    if path.is_dir() and _is_saved(path):
        size = len(open_saved(str(path)))
        stamp = _stamp(next(file for file in path.rglob("*.json")))
        return list(_pieces("saved", path, size, PART_RECORDS, stamp))
    files = _files_of(source, path)
    if not files and HUB_NAME.fullmatch(source) and not FILE_NAME.fullmatch(source):
        return [Part("hub", source, 0, 0, (0, 0))]
    if not files:
        raise ValueError(
            f"no data at {source!r}: it is no file, no folder with files, no glob that matches "
            "any, and no name of a dataset on the hub (OWNER/NAME). Relative paths are taken from "
            "the current directory."
        )
    if path.is_dir() and any(file.suffix.lower() in TABLE_FILES for file in files):
        files = _training_files(path, files)
    return [part for file in files for part in _parts_of_file(file)]


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    names = {file.name for file in folder.iterdir()}
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def _files_of(source: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [f for f in path.rglob("*") if not HIDDEN.search(f.relative_to(path).as_posix())]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    for file in found:
        _check_link(file)
    return sorted(file for file in found if file.is_file())


def _check_link(file: Path) -> None:
    """Refuse links behind which data would be left out in silence."""
    if not file.is_symlink() or file.is_file():
        return
    target = os.readlink(file)
    if file.is_dir():
        raise BadRecord(
            f"{file} is a link to the folder {target}, and folders behind links are not read. Give "
            f"that folder as a source of its own, in place of the link."
        )
    raise BadRecord(f"{file} is a link to {target}, where no file is. Mend it, or remove it.")


def _training_files(folder: Path, files: list[Path]) -> list[Path]:
    """Of a dataset's folder, as it lies on the hub, the files of its split `train`."""
    from datasets import load_dataset_builder

    try:
        splits = load_dataset_builder(str(folder)).config.data_files
    except (OSError, ValueError, YAMLError) as error:
        raise BadRecord(
            f"{folder}: `datasets` can't tell which of its files are for training "
            f"({' '.join(str(error).split())[:300]}). Give a glob of those that are meant."
        ) from error
    if "train" not in splits:
        raise BadRecord(
            f"{folder} has the splits {', '.join(map(str, splits))}: one named train is needed. Or "
            "give a glob of the files that are meant."
        )
    known = {Path(name) for names in splits.values() for name in names}
    for file in files:
        is_data = file.suffix.lower() in (*READERS, ".txt", ".tsv") and not ABOUT.match(file.name)
        if is_data and file.absolute() not in known:
            raise BadRecord(
                f"{file}: `datasets` reads the files of one kind in a folder, and this is not one "
                "of them. Give a glob of the files that are meant."
            )
    return [Path(name) for name in splits["train"]]


def _parts_of_file(file: Path) -> Iterator[Part]:
    reader, stamp = reader_of(file), _stamp(file)
    if reader == "jsonl":
        yield from _pieces(reader, file, stamp[0], PART_BYTES, stamp)
    elif reader == "parquet":
        size = open_parquet(str(file)).metadata.num_rows
        yield from _pieces(reader, file, size, PART_RECORDS, stamp)
    elif reader == "arrow":
        yield from _pieces(reader, file, len(open_arrow(str(file))), PART_RECORDS, stamp)
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
