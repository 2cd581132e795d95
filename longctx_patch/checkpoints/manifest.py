"""`manifest.json`: size and SHA-256 of every file of a checkpoint, written last.

A kill at any moment leaves a whole checkpoint. A folder without a manifest is none. `seal` writes
it after all files are on the disk, under another name that is then changed to its own. Older
checkpoints are deleted only after that (`series.py`, which renames a folder before it empties it).

The checksums find files that were cut, flipped, lost or exchanged by accident. They stop nobody who
can write the manifest too, so `plain_pickle` checks what would be unpickled.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from longctx_patch.rules.together import num_ranks, of_all_ranks, own_rank

from .whole_files import sync_folder, write_whole

MANIFEST = "manifest.json"
FORMAT = 1
MISSING = f"{MANIFEST} is missing: it was not saved to the end"
THREADS = 4
"""Hashing lets other threads run: each adds 1.6 GiB/s where the CPU has instructions for SHA."""
OWNED = re.compile(r"(?:__|rng_state_|random_)(\d+)(?:_\d+)?\.(?:distcp|pth|safetensors)")
"""Names of files that each rank writes for itself; rank 0 writes all others."""
BEGUN = ".begun"
"""An empty file, written first: without it and a manifest, a folder is the user's, whatever its
name."""
PASSING = {BEGUN, MANIFEST, f"{MANIFEST}.tmp", "checkpoint-is-incomplete.txt"}
"""Names that no manifest has; the last one is there while transformers saves on SIGTERM."""
UNPICKLED = {".bin", ".distcp", ".metadata", ".pickle", ".pkl", ".pt", ".pth"}
"""Suffixes of files that loading might unpickle: none may lie there that the manifest lacks."""


@dataclass(frozen=True)
class FileRecord:
    """Holds what the manifest says of a file."""

    bytes: int
    sha256: str


class BadManifest(ValueError):
    """There is no manifest, or it can't be believed."""


def begin(folder: Path) -> None:
    """Make the folder of a checkpoint, if it is missing, and mark it as one; one process calls it.

    Where it was complete, it no longer is: what is written into it belongs to another moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BEGUN).touch()
    (folder / MANIFEST).unlink(missing_ok=True)


def seal(folder: Path, group: ProcessGroup | None = None) -> None:
    """Sync and hash what all ranks have written into `folder`, and write its manifest.

    Collective: each rank calls it after it has written, and hashes its own files. When it returns,
    the checkpoint is complete on disk. `group`: see `of_all_ranks`.
    """
    of_all_ranks(
        None, group
    )  # a file that another rank writes has a temporary name until it is whole
    rank = own_rank()
    mine = {name: folder / name for name in names_in(folder) if _writer_of(name) == rank}
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(mine, pool.map(_synced_record, mine.values()), strict=True))
    everyones = of_all_ranks(found, group)
    if rank == 0:
        for inner in {path.parent for path in folder.rglob("*")} - {folder}:
            sync_folder(inner)
        write_manifest(folder, {n: r for records in everyones for n, r in records.items()})
        sync_folder(folder.parent)
    of_all_ranks(None, group)  # nobody goes on before it is there


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest, in full or not at all."""
    body = {"format": FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_whole(folder / MANIFEST, _rendered(body))


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The records of a checkpoint's files by their names in it. Raises BadManifest."""
    try:
        text = (folder / MANIFEST).read_bytes()
        content = json.loads(text)
        del content["sha256"]
        if text != _rendered(content):
            raise BadManifest(f"{MANIFEST} is damaged: it has another checksum")
        if content["format"] != FORMAT:
            raise BadManifest(f"{MANIFEST} has format {content['format']}, known is {FORMAT}")
        return {name: FileRecord(**record) for name, record in content["files"].items()}
    except FileNotFoundError:
        raise BadManifest(MISSING) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, BadManifest):
            raise
        raise BadManifest(f"{MANIFEST} is damaged: {error}") from error


def problems_of(folder: Path) -> list[str]:
    """Says what is wrong with the files of a checkpoint, in words that begin with a file's name.

    Collective: ranks divide the files, and all return the problems of all.
    """
    try:
        files = read_manifest(folder)
    except BadManifest as error:
        found = [str(error)]
    else:
        by_size = sorted(files, key=lambda name: (files[name].bytes, name))
        share = by_size[own_rank() :: num_ranks()]
        found = [*compare(folder, {name: files[name] for name in share})]
        if own_rank() == 0:
            found += _unlisted(folder, files)
    return sorted({problem for problems in of_all_ranks(found) for problem in problems})


def compare(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[str]:
    """Yield a problem for each file that is not as its record says."""
    with ThreadPoolExecutor(THREADS) as pool:
        checked = pool.map(lambda name: _problem(folder / name, name, files[name]), files)
        yield from filter(None, checked)


def names_in(folder: Path) -> Iterable[str]:
    """Files below a checkpoint that belong into its manifest."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in PASSING:
            yield name


def _unlisted(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[str]:
    for name in names_in(folder):
        path = Path(name)
        if name not in files and (path.suffix in UNPICKLED or path.name in UNPICKLED):
            yield f"{name} is not in {MANIFEST}"


def _problem(path: Path, name: str, record: FileRecord) -> str:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{name} has {size} bytes, not {record.bytes}"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} can't be read: {error}"
    return "" if found == record.sha256 else f"{name} is damaged: it has another checksum"


def _synced_record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileRecord(file.tell(), found)


def _writer_of(name: str) -> int:
    owned = OWNED.fullmatch(name.rsplit("/", 1)[-1])
    return int(owned[1]) % num_ranks() if owned else 0


def _rendered(body: dict[str, object]) -> bytes:
    """The manifest as it stands on disk, with a checksum of its own."""
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"sha256": own}, indent=1) + "\n").encode()
