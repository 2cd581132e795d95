"""Files and folders that are either there in full or not at all, also after a loss of power."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, sync it, and give it its name: readers see all or nothing.

    When this returns, the file and its name are on disk.
    """
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def name_problem(folder: Path, option: str) -> str:
    """Says why not all of a run's files can be written under the path `folder`, in words; empty
    where they can. Some writers take paths in UTF-8, and others in the file system's encoding."""
    path = os.path.abspath(folder)
    try:
        path.encode("utf-8")
        os.fsencode(path)
    except UnicodeEncodeError:
        system = sys.getfilesystemencoding()
        utf8 = "" if system == "utf-8" else ", or start Python in UTF-8: PYTHONUTF8=1"
        return (
            f"{option} {path!a}: the path has to be text that UTF-8 and the file system's encoding "
            f"({system}) can write. Give another {option}{utf8}."
        )
    return ""


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a place beside `folder` to write to; it takes the place of `folder`, with all that is
    in there, when the block ends without an error.

    Every process calls this, and writes what it has to.
    """
    from longctx_patch.rules.together import of_all_ranks, own_rank  # with torch, seconds

    beside = folder.with_name(f"{folder.name}.incomplete")
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
    before = folder.with_name(f"{folder.name}.before")
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
