"""Which checkpoint a run goes on from: the newest whose every file is as it was written."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longctx_patch.plugin.together import of_all_ranks, own_rank

from .manifest import MANIFEST, MISSING, problems_of
from .names import ASIDE, Checkpoint, Series
from .places import KEPT, is_ours
from .plain_pickle import not_plain


@dataclass(frozen=True)
class Passed:
    """A checkpoint that no run can go on from."""

    path: Path
    problems: list[str]

    @property
    def was_saved(self) -> bool:
        """Whether it was complete once."""
        return self.problems != [MISSING]

    @property
    def is_ours(self) -> bool:
        """Whether it was begun as a checkpoint; else it is a folder of the user's."""
        return self.was_saved or is_ours(self.path)

    def __str__(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.path}: {self.problems[0]}{more}"


def complete(series: Series) -> list[Checkpoint]:
    """The checkpoints that were saved to the end, the oldest first; nobody has checked them."""
    return [each for each in series.found() if (each.path / MANIFEST).exists()]


def problems_in(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, in words that begin with a file's name: its checksums, and
    then what would be unpickled. Collective; all ranks return the same."""
    found = problems_of(checkpoint)
    if not found and own_rank() == 0:
        found = not_plain(checkpoint)
    return of_all_ranks(found)[0]


def newest_good(
    series: Series,
    say: Callable[[str], object],
    *,
    problems: Callable[[Path], list[str]] = problems_in,
) -> Path | None:
    """The newest checkpoint that is whole; every process calls this.

    Newer ones are named with the file that is wrong, and get another name, so that nothing counts
    them; folders of the user's keep theirs. All files are checked before anything is unpickled.
    None where no checkpoint was saved to the end. `problems`: what is wrong with one; collective,
    and the same on all ranks.

    Raises ValueError, on all processes, if some were and none of them is whole.
    """
    passed: list[Passed] = []
    for candidate in reversed(of_all_ranks(series.found())[0]):
        found = problems(candidate.path)
        if not found:
            _set_aside(passed, say)
            if passed:
                say(f"going on from {candidate.path}, in which every file is whole")
            return candidate.path
        passed.append(Passed(candidate.path, found))
    if any(each.was_saved for each in passed):
        listed = "\n  ".join(map(str, passed))
        raise ValueError(
            f"none of the checkpoints under {series.folder} is whole, so no run can go on from "
            f"them:\n  {listed}\nGet one of them back from a copy, or start in a new folder."
        )
    _set_aside(passed, say)
    return None


def _set_aside(passed: list[Passed], say: Callable[[str], object]) -> None:
    """Rename them, so that a later checkpoint of the same step finds its place free."""
    everyones = of_all_ranks([each.is_ours for each in passed])[0]  # before one is renamed
    for each, ours in zip(passed, everyones, strict=True):
        if not ours:
            say(
                f"{each.path} is no checkpoint of this package, and is left alone. If that step is "
                f"saved, it gets the name {each.path.name}{KEPT}"
            )
            continue
        kind = ASIDE[0] if each.was_saved else ASIDE[1]
        place = each.path.with_name(each.path.name + kind)
        if own_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            each.path.rename(place)
        what = "damaged" if each.was_saved else "incomplete"
        say(f"a checkpoint is {what}: {each}. It is now {place.name}")
    of_all_ranks(None)
