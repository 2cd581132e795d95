"""The place of a new checkpoint: what is there and was not begun as one keeps its files."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from .manifest import BEGUN, MANIFEST

KEPT = ".kept"
"""Behind the name of what was in the place of a checkpoint; a number follows where that is taken,
too."""


def is_ours(folder: Path) -> bool:
    """Whether a folder was begun as a checkpoint; else it is the user's, whatever its name."""
    return not folder.is_symlink() and any((folder / name).exists() for name in (BEGUN, MANIFEST))


def clear(place: Path, say: Callable[[str], object]) -> None:
    """Make a checkpoint's place free; one process calls it. What a run has begun there is deleted,
    all else gets another name."""
    keep_others(place, say)
    shutil.rmtree(place, ignore_errors=True)


def keep_others(place: Path, say: Callable[[str], object]) -> None:
    """Give what is in a checkpoint's place another name, unless a run has begun it, and say so; one
    process calls it. It ends no run in the middle, and loses no file."""
    if not os.path.lexists(place) or is_ours(place) or _is_empty(place):
        return
    names = (place.name + KEPT + (f"_{number}" if number > 1 else "") for number in count(1))
    free = next(new for name in names if not os.path.lexists(new := place.with_name(name)))
    place.rename(free)
    say(f"{place} was no checkpoint of this package: it is now {free.name}, with all its files")


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and not any(place.iterdir())
