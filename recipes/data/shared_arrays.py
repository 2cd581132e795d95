"""Arrays that one process of a machine makes, and all its processes map into memory.

They lie beside the tables of tokens, in the cache of `datasets`, and later runs find them made.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import datasets.config
import numpy as np
from filelock import FileLock

from longctx_patch.checkpoints.whole_files import write_whole
from longctx_patch.recipes.data.sealed import seal, what_changed

Arrays = Mapping[str, np.ndarray]


def shared_arrays(key: str, names: tuple[str, ...], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of these names, made if they are not there; others wait while one makes them.

    `key` is equal where `make` gives equal arrays, and unlike any other.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "longctx_rows" / key
    folder.mkdir(parents=True, exist_ok=True)
    files = [_file(folder, name) for name in names]
    with FileLock(folder / ".lock"):
        if what_changed(folder):  # or not made yet, or not to its end
            made = make()
            for name, file in zip(names, files, strict=True):
                content = io.BytesIO()
                np.save(content, made[name])
                write_whole(file, content.getvalue())
            seal(folder, files)
    return {name: np.load(file, mmap_mode="r") for name, file in zip(names, files, strict=True)}


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"
