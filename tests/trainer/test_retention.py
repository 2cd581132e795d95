"""Which of a trainer's checkpoints are kept, and which are deleted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longctx_patch.checkpoints.manifest import seal
from longctx_patch.trainer import sealing
from tests.trainer.stock import Trained


def test_the_best_one_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for limit, kept in ((1, [4, 12]), (2, [4, 12]), (3, [4, 10, 12]), (0, [2, 4, 10, 12])):
        output = tmp_path / str(limit)
        for step in (2, 4, 10, 12):
            (output / f"checkpoint-{step}").mkdir(parents=True)
            seal(output / f"checkpoint-{step}")
        trainer = Trained(output, str(output / "checkpoint-4"), save_total_limit=limit)
        trainer._delete_old(output / "checkpoint-12")
        found = sorted(int(path.name.split("-")[1]) for path in output.iterdir())
        assert found == kept


def test_those_of_every_so_many_steps_are_kept_for_ever(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        seal(tmp_path / f"checkpoint-{step}")
    trainer = Trained(tmp_path, str(tmp_path / "checkpoint-6"), save_total_limit=1)
    trainer._keep_every = 4
    trainer._delete_old(tmp_path / "checkpoint-10")
    found = {int(path.name.split("-")[1]) for path in tmp_path.iterdir()}
    assert found == {4, 6, 8, 10}
    trainer._finalize_training(None)
    assert {int(path.name.split("-")[1]) for path in tmp_path.iterdir()} == {4, 6, 8}


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


@pytest.mark.parametrize("limit", [1, 2])
def test_what_was_just_saved_is_kept_also_where_a_run_went_on_from_an_older_one(
    tmp_path: Path, limit: int
) -> None:
    """Newer ones of the run before are there, and would be gone on from next."""
    for step in (2, 4, 6, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
        seal(tmp_path / f"checkpoint-{step}")
    trainer = Trained(tmp_path, None, save_total_limit=limit)
    trainer._delete_old(tmp_path / "checkpoint-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize(("limit", "kept"), [(1, [4]), (2, [2, 4, 6])])
def test_at_the_end_the_best_one_alone_is_kept_and_what_is_the_user_s(
    tmp_path: Path, limit: int, kept: list[int]
) -> None:
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
        seal(tmp_path / f"checkpoint-{step}")
    for name in ("checkpoint-7", "checkpoint-4-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    trainer = Trained(tmp_path, str(tmp_path / "checkpoint-4"), save_total_limit=limit)
    assert trainer._finalize_training(None) == "the end"
    assert trainer.args.save_total_limit == limit
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"checkpoint-7", "checkpoint-4-notes", *(f"checkpoint-{n}" for n in kept)}
