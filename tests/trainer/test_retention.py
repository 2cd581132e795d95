"""Which of a trainer's checkpoints are kept, and which are deleted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx_patch.checkpoints.manifest import seal
from longctx_patch.trainer import sealing
from tests.trainer.stock import Trained


def made(folder: Path, steps: tuple[int, ...], best: int | None, limit: int, every: int) -> Trained:
    """A trainer whose checkpoints of these steps are whole."""
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        seal(folder / f"checkpoint-{step}")
    name = None if best is None else str(folder / f"checkpoint-{best}")
    trainer = Trained(folder, name, save_total_limit=limit)
    trainer._keep_every = every
    return trainer


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


FOUR, FIVE, OLD = (2, 4, 10, 12), (2, 4, 6, 8, 10), (2, 4, 6, 8)


@pytest.mark.parametrize(
    ("steps", "saved", "best", "limit", "every", "kept"),
    [
        (FOUR, 12, 4, 1, 0, [4, 12]),
        (FOUR, 12, 4, 2, 0, [4, 12]),
        (FOUR, 12, 4, 3, 0, [4, 10, 12]),
        (FOUR, 12, 4, 0, 0, [*FOUR]),
        (FIVE, 10, 6, 1, 4, [4, 6, 8, 10]),
        # A run went on from an older one: those of the run before are newer than what was saved.
        (OLD, 4, None, 1, 0, [4, 8]),
        (OLD, 4, None, 2, 0, [4, 8]),
    ],
)
def test_the_newest_the_best_and_what_was_just_saved_are_kept(
    tmp_path: Path,
    steps: tuple[int, ...],
    saved: int,
    best: int | None,
    limit: int,
    every: int,
    kept: list[int],
) -> None:
    made(tmp_path, steps, best, limit, every)._delete_old(tmp_path / f"checkpoint-{saved}")
    assert steps_in(tmp_path) == kept


@pytest.mark.parametrize(
    ("keep_every", "changes", "words"),
    [
        (-1, {}, "keep_every=-1: a number of steps, 0 or more"),
        (4, {"save_total_limit": None}, "keep_every=4 without save_total_limit"),
        (4, {"save_on_each_node": True}, "keep_every=4 with save_on_each_node"),
        (5, {}, "keep_every=5 with save_strategy='steps' and save_steps=2: its checkpoints"),
        (4, {"save_strategy": "epoch"}, "save_strategy='epoch'"),
        (4, {}, ""),
        (0, {"save_total_limit": None}, ""),
    ],
)
def test_what_would_keep_nothing_is_refused(
    keep_every: int, changes: dict[str, Any], words: str
) -> None:
    usual = {"save_total_limit": 1, "save_on_each_node": False}
    args = SimpleNamespace(**usual | {"save_strategy": "steps", "save_steps": 2} | changes)
    said = list(sealing.kept_problems(args, keep_every))
    assert len(said) == bool(words)
    assert words in "".join(said)


@pytest.mark.parametrize(
    ("limit", "every", "kept"), [(1, 0, [4]), (1, 3, [4, 6]), (2, 0, [2, 4, 6])]
)
def test_at_the_end_the_best_one_alone_is_kept_and_what_is_the_user_s(
    tmp_path: Path, limit: int, every: int, kept: list[int]
) -> None:
    trainer = made(tmp_path, (2, 4, 6), 4, limit, every)
    for name in ("checkpoint-7", "checkpoint-4-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    assert trainer._finalize_training(None) == "the end"
    assert trainer.args.save_total_limit == limit
    assert steps_in(tmp_path) == sorted([*kept, 4, 7])
