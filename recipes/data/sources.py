"""Sources of training data, cut into parts that processes read side by side.

A source is a file (`kinds.py` says of which kinds), a folder of such files, a glob, a folder that
`Dataset.save_to_disk` wrote, or the name of a dataset on the hub. `addresses.py` says how one of
their splits is named. Where one is, or where a folder has parquet or arrow files, `datasets` says
which files are in it.
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from yaml import YAMLError

from longctx_patch.recipes.data.addresses import (
    TRAIN,
    Address,
    address_of,
    chosen_split,
    commit_of,
)
from longctx_patch.recipes.data.kinds import READERS, TABLE_FILES, reader_of
from longctx_patch.recipes.data.readers import (
    Part,
    Reader,
    open_arrow,
    open_parquet,
    open_saved,
    records_of,
    saved_splits,
)
from longctx_patch.recipes.data.records import (
    BadRecord,
    Kind,
    is_empty_file,
    kind_of,
    unreadable,
)

PART_BYTES = 4 * 2**20
"""A part of a `.jsonl` file ends with the line in which it has so many: a tokenizer needs a few
seconds for it, so that already a file of 100 MB keeps many processes busy."""
PART_RECORDS = 10_000
"""A part of a table has so many."""
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


def first_kind(source: str, text_field: str) -> Kind:
    """The kind of a source's first record. Raises ValueError for a source without any."""
    for part in parts_of(source):
        for record in records_of(part):
            if not is_empty_file(record):
                return kind_of(record, text_field)
    raise ValueError(
        f"no data in {source!r}: its files hold no records. Give files or folders with text."
    )


def check_unchanged(parts: Sequence[Part]) -> None:
    """Raise ValueError for a file that another process has written to since its parts were made."""
    stamps = {part.path: part.stamp for part in parts if part.reader not in ("hub", "saved")}
    for path, stamp in stamps.items():
        if not os.path.isfile(path) or _stamp(Path(path)) != stamp:
            raise BadRecord(f"{path} was changed while it was read. Start again once it is whole.")


def check_apart(output: str | Path, sources: Sequence[str]) -> None:
    """Raise ValueError for an output within a folder of data, whose files would become data."""
    for source in sources:
        folder = Path(os.path.realpath(Path(address_of(source).path).expanduser()))
        written = Path(output).expanduser().resolve()
        if not folder.is_dir() or not written.is_relative_to(folder):
            continue
        if not any(part.startswith(".") for part in written.relative_to(folder).parts):
            raise ValueError(
                f"the output {written} lies in {source}, which is read as data: a later start "
                "would train on what the run has written. Give an output beside it, or a glob of "
                "the files that are meant."
            )


def splits_of(address: Address) -> list[str]:
    """The splits of a folder, as far as its files tell them apart; none for other sources."""
    path = Path(address.path).expanduser()
    if address.is_hub or not path.is_dir():
        return []
    if _is_saved(path):
        return list(saved_splits(str(path)))
    files = _files_of(path)
    return [*map(str, _splits(path))] if any(map(_is_table, files)) else []


def _parts_of(source: str) -> list[Part]:
    address = address_of(source)
    path = Path(address.path).expanduser()
    if address.is_hub:
        commit, split = commit_of(address), address.split or TRAIN
        return [Part("hub", address.path, 0, 0, (commit,), split, address.config)]
    if path.is_dir() and _is_saved(path):
        return list(_parts_of_saved(path, address.split))
    files = _files_of(path)
    if not files:
        raise ValueError(
            f"no data at {source!r}: it is no file, no folder with files, no glob that matches "
            "any, and no name of a dataset on the hub (OWNER/NAME, OWNER/NAME:SPLIT or "
            "OWNER/NAME:CONFIG/SPLIT). Relative paths are taken from the current directory."
        )
    if path.is_dir() and (address.split or any(map(_is_table, files))):
        files = _files_of_split(path, files, address.split)
    return [part for file in files for part in _parts_of_file(file)]


def _parts_of_saved(path: Path, asked: str) -> Iterator[Part]:
    splits = saved_splits(str(path))
    if asked and not splits:
        raise BadRecord(f"{path} is one table without splits. Leave out :{asked}.")
    split = chosen_split(splits, asked, str(path)) if splits else ""
    size = len(open_saved(str(path), split))
    stamp = _stamp(path / split / "state.json")
    yield from _pieces("saved", path, size, PART_RECORDS, stamp, split)


def _is_saved(folder: Path) -> bool:
    """Says whether `save_to_disk` wrote the folder."""
    names = {file.name for file in folder.iterdir()}
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLE_FILES


def _files_of(path: Path) -> list[Path]:
    """The files of a file, a folder or a glob."""
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


def _files_of_split(folder: Path, files: list[Path], asked: str) -> list[Path]:
    """Lists the files of a split in a dataset's folder, as it lies on the hub."""
    splits = _splits(folder)
    split = chosen_split([*map(str, splits)], asked, str(folder))
    known = {Path(name) for names in splits.values() for name in names}
    for file in files:
        is_data = file.suffix.lower() in (*READERS, ".txt", ".tsv") and not ABOUT.match(file.name)
        if is_data and file.absolute() not in known:
            raise BadRecord(
                f"{file}: `datasets` reads the files of one kind in a folder, and this is not one "
                "of them. Give a glob of the files that are meant."
            )
    return [Path(name) for name in splits[split]]


def _splits(folder: Path) -> Mapping[str, Sequence[str]]:
    """The files of each split, as `datasets` finds them."""
    from datasets import load_dataset_builder

    try:
        found: Mapping[str, Sequence[str]] = load_dataset_builder(str(folder)).config.data_files
    except (OSError, ValueError, YAMLError) as error:
        raise BadRecord(
            f"{folder}: `datasets` can't tell which of its files are for training "
            f"({' '.join(str(error).split())[:300]}). Give a glob of those that are meant."
        ) from error
    return found


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
    reader: Reader, path: Path, size: int, step: int, stamp: tuple[int, int], split: str = ""
) -> Iterator[Part]:
    for start in range(0, size, step):
        yield Part(reader, str(path), start, min(start + step, size), stamp, split)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def check_evaluation(data: Sequence[str], eval_data: Sequence[str]) -> None:
    """Raise ValueError for evaluation data of which no split is named, though there are several,
    and for files or splits that are trained on too."""
    trained = {_place(part): source for source in data for part in parts_of(source)}
    for source in eval_data:
        _check_names_split(source)
        for part in parts_of(source):
            if (other := trained.get(_place(part))) is not None:
                raise ValueError(_same(source, other, part))


def _place(part: Part) -> tuple[str, str, str]:
    path = part.path if part.reader == "hub" else os.path.realpath(part.path)
    return path, part.config, part.split


def _check_names_split(source: str) -> None:
    """A source that names none is its split `train`, which is a strange one to evaluate on."""
    address = address_of(source)
    splits = splits_of(address)
    if address.split or not (address.is_hub or len(splits) > 1):
        return
    has = f"has the splits {', '.join(splits)}" if splits else "may have several splits"
    test = next((name for name in splits if name != TRAIN), "test")
    raise ValueError(
        f"eval_data {source!r} {has}: name the one to evaluate on, such as {address.named(test)}."
    )


def _same(source: str, other: str, part: Part) -> str:
    split = f", split {part.split}" if part.split else ""
    ask = "Give other files or another split"
    both = f"eval_data {source!r} and data {other!r} both read {part.path}{split}"
    splits = splits_of(address_of(source))
    if others := [name for name in splits if name != TRAIN]:
        ask = f"Name another split, such as {address_of(source).named(others[0])}"
    return (
        f"{both}, so that it would be evaluated on what it learns. {ask}; or leave eval_data out "
        "and hold rows out: eval_share: 0.02."
    )
