"""Which folders are checkpoints, and in which order."""

from pathlib import Path

from longctx_patch.checkpoints.choosing import complete
from longctx_patch.checkpoints.manifest import write_manifest
from longctx_patch.checkpoints.names import steps_of, trainer_checkpoints_of
from longctx_patch.checkpoints.retention import Retention, delete_old


def test_names_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    steps, trainers = steps_of(tmp_path), trainer_checkpoints_of(tmp_path)
    for name in ("step_1000000", "step_999999", "step_000007", "step_foo", "step_7", "my_step_1"):
        (steps.folder / name).mkdir(parents=True)
    for name in ("step_000009.damaged", "step_000008.incomplete", "step_-00001"):
        (steps.folder / name).mkdir()
    (steps.folder / "step_000011").write_text("a file of the user's")
    (steps.folder / "step_000012").symlink_to(steps.folder / "step_999999")
    assert [each.step for each in steps.found()] == [7, 999999, 1000000]
    assert [path.name for path in steps.aside()] == [
        "step_000008.incomplete",
        "step_000009.damaged",
    ]
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "checkpoint-010"):
        (tmp_path / name).mkdir()
    assert [each.step for each in trainers.found()] == [9, 10]
    assert steps_of(tmp_path / "nowhere").found() == []


def test_the_newest_and_one_of_every_so_many_are_kept(tmp_path: Path) -> None:
    series = steps_of(tmp_path)
    for step in (2, 4, 6, 8, 10, 12):
        series.path_of(step).mkdir(parents=True)
        if step != 12:  # which is being written
            write_manifest(series.path_of(step), {})
    (series.folder / "step_000001.damaged").mkdir()
    (series.folder / "step_foo").mkdir()
    assert delete_old(series, Retention()) == []
    assert delete_old(series, Retention(keep_last=2, keep_every=4), spared={series.path_of(2)}) == [
        series.path_of(6)
    ]
    assert [each.step for each in complete(series)] == [2, 4, 8, 10]
    assert sorted(path.name for path in series.folder.iterdir()) == [
        *(f"step_{step:06d}" for step in (2, 4, 8, 10, 12)),
        "step_foo",
    ]
