"""Arrays that one process of a machine makes, and all its processes map into memory.

They lie beside the tables of tokens, in the cache of `datasets`, and later runs find them made.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import datasets.config
import numpy as np
from filelock import FileLock

from longctx_patch.checkpoints.files import write_whole

Arrays = Mapping[str, np.ndarray]


def shared_arrays(key: str, names: tuple[str, ...], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of these names, made if they are not there; others wait while one makes them.

    `key` is equal where `make` gives equal arrays, and unlike any other.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "longctx_rows" / key
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        found = _mapped(folder, names)
        if found is None:
            made = make()
            for name in names:
                content = io.BytesIO()
                np.save(content, made[name])
                write_whole(_file(folder, name), content.getvalue())
            found = _mapped(folder, names)
    assert found is not None
    return found


def _mapped(folder: Path, names: tuple[str, ...]) -> Arrays | None:
    """None where a file is missing, or is not one that was written to its end."""
    try:
        return {name: np.load(_file(folder, name), mmap_mode="r") for name in names}
    except (FileNotFoundError, ValueError, EOFError):
        return None


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"
