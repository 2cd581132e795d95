"""Folders of files that a run may make again: whoever finds one knows whether its files are still
those that were written.

A file's size and digest are compared each time: 100 million tokens take 0.06 s. (Digests of rows
that are compared as rows are read take 10 times as long, and find a change in the middle of a run.)
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets.config
import numpy as np
import xxhash
from filelock import FileLock

from longctx_patch.checkpoints.whole_files import write_whole

SEAL = "sealed.json"
BLOCK_BYTES = 2**18
Arrays = Mapping[str, np.ndarray]


def seal(folder: Path, files: Iterable[Path], **more: Any) -> None:
    """Write what the files in the folder are, and more that is to be known of them."""
    content = {"files": {file.name: _facts(file) for file in files}, **more}
    write_whole(folder / SEAL, json.dumps(content).encode())


def sealed(folder: Path) -> Mapping[str, Any]:
    """Returns what was written of a folder. Raises ValueError or OSError for a damaged seal."""
    found: Mapping[str, Any] = json.loads((folder / SEAL).read_bytes())
    return found


def what_changed(folder: Path) -> str:
    """The file that is another than was written, and how; empty where all are as they were."""
    try:
        files = sealed(folder)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder / SEAL} is damaged or missing"
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if (now := file.stat().st_size) != size:
            return f"{file} has {now:,} bytes and had {size:,}"
        if _facts(file)[1] != digest:
            return f"{file} holds other bytes than were written"
    return ""


def _facts(file: Path) -> tuple[int, str]:
    """(bytes, digest) of a file."""
    content, buffer, size = xxhash.xxh3_128(), bytearray(BLOCK_BYTES), 0
    with file.open("rb", buffering=0) as opened:
        while number := opened.readinto(buffer):
            content.update(memoryview(buffer)[:number])
            size += number
    return size, content.hexdigest()


def shared_arrays(key: str, names: tuple[str, ...], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of these names, made if they are not there; others wait while one makes them. They
    lie beside the tables of tokens, in the cache of `datasets`, and are mapped into memory.

    `key` is equal where `make` gives equal arrays, and unlike any other.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "longctx_rows" / key
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.npy" for name in names]
    with FileLock(folder / ".lock"):
        if what_changed(folder):  # or not made yet, or not to its end
            made = make()
            for name, file in zip(names, files, strict=True):
                content = io.BytesIO()
                np.save(content, made[name])
                write_whole(file, content.getvalue())
            seal(folder, files)
    return {name: np.load(file, mmap_mode="r") for name, file in zip(names, files, strict=True)}
