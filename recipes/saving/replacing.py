"""A folder that is there in full or not at all, also where a kill ends the process that writes it.

No run and no library finds half a model in `final/`: it gets its name when every file is on disk.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longctx_patch.checkpoints.files import sync_folder
from longctx_patch.checkpoints.names import ASIDE
from longctx_patch.plugin.together import of_all_ranks, own_rank

BEFORE = ".before"
"""Behind the name of the folder that is replaced, for a moment."""


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a place beside `folder` to write to; it takes the place of `folder`, with all that is
    in there, when the block ends without an error.

    Every process calls this, and writes what it has to.
    """
    beside = folder.with_name(folder.name + ASIDE[1])
    if own_rank() == 0:
        _remove(beside)  # of a run that was ended while it wrote
        beside.mkdir(parents=True)
    of_all_ranks(None)
    yield beside
    of_all_ranks(None)
    if own_rank() == 0:
        _sync(beside)
        _exchange(beside, folder)
    of_all_ranks(None)


def _exchange(new: Path, folder: Path) -> None:
    before = folder.with_name(folder.name + BEFORE)
    _remove(before)
    if folder.exists() or folder.is_symlink():
        folder.rename(before)
    new.rename(folder)
    sync_folder(folder.parent)
    _remove(before)


def _sync(folder: Path) -> None:
    """Bring all files below a folder, and their names, to disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
