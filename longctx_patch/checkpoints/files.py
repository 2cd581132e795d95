"""Files that are either there in full or not at all, also after a loss of power."""

import os
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


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
