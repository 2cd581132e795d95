"""The checkpoints of one output: which folders are some, which one a run goes on from, and which
are deleted. A folder that no run has begun is the user's, whatever its name, and keeps its files.
"""

import os
import re
import shutil
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from longctx_patch.rules.together import of_all_ranks, own_rank

from .manifest import BEGUN, MANIFEST, MISSING, problems_of
from .plain_pickle import not_plain

ASIDE = (".damaged", ".incomplete")
"""What is put behind the name of a folder that no longer is a checkpoint."""
KEPT = ".kept"
"""What is put behind the name of what was in the place of a checkpoint; then a number."""
FLIGHT = "flight"
"""The folder with a record of each rank, if the job has hung."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the name of a checkpoint; nobody has looked into it yet."""

    step: int
    path: Path


@dataclass(frozen=True)
class Series:
    """The checkpoints of one output: folders `PREFIXn` side by side in `folder`.

    `checkpoint-1000000` comes after `checkpoint-999999`. Files, links and other names, such as
    `checkpoint-best`, are the user's.
    """

    folder: Path
    prefix: str

    def path_of(self, step: int) -> Path:
        return self.folder / f"{self.prefix}{step}"

    def found(self) -> list[Checkpoint]:
        """The folders with names that this series gives, the oldest first."""
        steps = [(int(match[1]), path) for path, match in self._named("([0-9]+)")]
        return [
            Checkpoint(step, path)
            for step, path in sorted(steps)
            if path == self.path_of(step) and path.is_dir() and not path.is_symlink()
        ]

    def complete(self) -> list[Checkpoint]:
        """Lists the checkpoints that were saved to the end, the oldest first, unchecked."""
        return [each for each in self.found() if (each.path / MANIFEST).exists()]

    def aside(self) -> list[Path]:
        """Folders that were given another name since no run can go on from them."""
        kinds = "|".join(map(re.escape, ASIDE))
        return sorted(path for path, _ in self._named(f"[0-9]+({kinds})"))

    def _named(self, ending: str) -> list[tuple[Path, re.Match[str]]]:
        name = re.compile(re.escape(self.prefix) + ending)
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return [(path, match) for path in paths if (match := name.fullmatch(path.name))]


def checkpoints_of(output: str | Path) -> Series:
    """The checkpoints of trainers, whose names are transformers'."""
    return Series(Path(output), "checkpoint-")


# ---- The place of a new one ----


def is_ours(folder: Path) -> bool:
    """Says whether a folder was begun as a checkpoint; else it is the user's, whatever its name."""
    return not folder.is_symlink() and any((folder / name).exists() for name in (BEGUN, MANIFEST))


def keep_others(place: Path, say: Say) -> None:
    """Give what is in a checkpoint's place another name, unless a run has begun it, and say so; one
    process calls it. It ends no run in the middle, and loses no file."""
    is_empty = place.is_dir() and not place.is_symlink() and not any(place.iterdir())
    if not os.path.lexists(place) or is_ours(place) or is_empty:
        return
    names = (place.name + KEPT + (f"_{number}" if number > 1 else "") for number in count(1))
    free = next(new for name in names if not os.path.lexists(new := place.with_name(name)))
    place.rename(free)
    say(f"{place} was no checkpoint of this package: it is now {free.name}, with all its files")


# ---- The one to go on from ----


def problems_in(checkpoint: Path) -> list[str]:
    """Says what is wrong with a checkpoint, in words that begin with a file's name: its checksums,
    and then what would be unpickled. Collective; all ranks return the same."""
    found = problems_of(checkpoint)
    if not found and own_rank() == 0:
        found = not_plain(checkpoint)
    return of_all_ranks(found)[0]


def newest_good(
    series: Series, say: Say, *, problems: Callable[[Path], list[str]] = problems_in
) -> Path | None:
    """The newest checkpoint that is whole; every process calls this.

    Newer ones are named with the file that is wrong, and get another name, so that nothing counts
    them; folders of the user's keep theirs. All files are checked before anything is unpickled.
    None where no checkpoint was saved to the end. `problems`: what is wrong with one; collective,
    and the same on all ranks.

    Raises ValueError, on all processes, if some were and none of them is whole.
    """
    passed: list[tuple[Path, list[str]]] = []
    for candidate in reversed(of_all_ranks(series.found())[0]):
        if not (found := problems(candidate.path)):
            _set_aside(passed, say)
            if passed:
                say(f"going on from {candidate.path}, in which every file is whole")
            return candidate.path
        passed.append((candidate.path, found))
    if any(found != [MISSING] for _, found in passed):
        listed = "\n  ".join(f"{path}: {first_of(found)}" for path, found in passed)
        raise ValueError(
            f"none of the checkpoints under {series.folder} is whole, so no run can go on from "
            f"them:\n  {listed}\nGet one of them back from a copy, or start in a new folder."
        )
    _set_aside(passed, say)
    return None


def first_of(problems: list[str]) -> str:
    """The first problem of a checkpoint, and how many there are beside it."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def _set_aside(passed: list[tuple[Path, list[str]]], say: Say) -> None:
    """Rename them, so that a later checkpoint of the same step finds its place free."""
    ours = of_all_ranks([is_ours(path) for path, _ in passed])[0]  # before one is renamed
    for (path, problems), is_own in zip(passed, ours, strict=True):
        was_saved = problems != [MISSING]
        if not is_own and not was_saved:
            say(
                f"{path} is no checkpoint of this package, and is left alone. If that step is "
                f"saved, it gets the name {path.name}{KEPT}"
            )
            continue
        place = path.with_name(path.name + ASIDE[0 if was_saved else 1])
        if own_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            path.rename(place)
        what = "damaged" if was_saved else "incomplete"
        say(f"a checkpoint is {what}: {path}: {first_of(problems)}. It is now {place.name}")
    of_all_ranks(None)


# ---- Which are kept ----


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Says how many checkpoints an output holds: all by default, since deleting is for ever."""

    keep_last: int = 0
    """The newest so many are kept; 0: all."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this are kept for ever; 0: none."""


def delete_old(series: Series, retention: Retention, *, spared: Container[Path] = ()) -> list[Path]:
    """Delete what is no longer to be kept; one process calls this, after a checkpoint is complete.

    `spared`: checkpoints that are kept whatever their step. Returns what was deleted.
    """
    if not retention.keep_last:
        return []
    old, every = series.complete()[: -retention.keep_last], retention.keep_every
    gone = [
        each.path
        for each in old
        if each.path not in spared and not (every and each.step % every == 0)
    ]
    delete(series, gone)
    return gone


def delete(series: Series, gone: Iterable[Path]) -> None:
    """Delete checkpoints of a series, and what no run can go on from; one process calls this.

    A folder loses its name first, so that what a kill leaves of it is no checkpoint, and goes the
    next time. A file that the system doesn't delete ends no run.
    """
    for path in gone:
        aside = path.with_name(path.name + ASIDE[1])
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    for path in series.aside():
        shutil.rmtree(path, ignore_errors=True)
