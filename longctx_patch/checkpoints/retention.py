"""Which checkpoints are kept: the newest, and one of every so many steps."""

import shutil
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from .choosing import complete
from .names import ASIDE, Series


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many checkpoints an output holds; by default all, since what is deleted can't be had
    back."""

    keep_last: int = 0
    """The newest so many are kept; 0: all."""
    keep_every: int = 0
    """Those whose step is a multiple of this are kept for ever; 0: none."""


def delete_old(series: Series, retention: Retention, *, spared: Container[Path] = ()) -> list[Path]:
    """Delete what is no longer to be kept; one process calls this, after a checkpoint is complete.

    `spared`: checkpoints that are kept whatever their step. Returns what was deleted.
    """
    if not retention.keep_last:
        return []
    old = complete(series)[: -retention.keep_last]
    every = retention.keep_every
    paths = [each.path for each in old if not (every and each.step % every == 0)]
    gone = [path for path in paths if path not in spared]
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
