"""Which folders are checkpoints, and in which order."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx_patch.checkpoints.manifest import begin, seal, write_manifest
from longctx_patch.checkpoints.series import (
    Retention,
    Series,
    checkpoints_of,
    delete_old,
    keep_others,
    newest_good,
)


def sealed(series: Series, *steps: int) -> None:
    """Checkpoints of these steps, without files."""
    for step in steps:
        begin(series.path_of(step))
        seal(series.path_of(step))


def test_names_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    steps = checkpoints_of(tmp_path)
    for number in (
        "1000000",
        "999999",
        "7",
        "10",
        "best",
        "010",
        "-1",
        "9.damaged",
        "8.incomplete",
    ):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "my-checkpoint-1").mkdir()
    (steps.folder / "checkpoint-11").write_text("a file of the user's")
    (steps.folder / "checkpoint-12").symlink_to(steps.folder / "checkpoint-999999")
    assert [each.step for each in steps.found()] == [7, 10, 999999, 1000000]
    aside = ["checkpoint-8.incomplete", "checkpoint-9.damaged"]
    assert [path.name for path in steps.aside()] == aside
    assert checkpoints_of(tmp_path / "nowhere").found() == []


def test_the_newest_and_one_of_every_so_many_are_kept(tmp_path: Path) -> None:
    series = checkpoints_of(tmp_path)
    for step in (2, 4, 6, 8, 10, 12):
        series.path_of(step).mkdir(parents=True)
        if step != 12:  # which is being written
            write_manifest(series.path_of(step), {})
    (series.folder / "checkpoint-1.damaged").mkdir()
    (series.folder / "checkpoint-foo").mkdir()
    assert delete_old(series, Retention()) == []
    assert delete_old(series, Retention(keep_last=2, keep_every=4), spared={series.path_of(2)}) == [
        series.path_of(6)
    ]
    assert [each.step for each in series.complete()] == [2, 4, 8, 10]
    assert sorted(path.name for path in series.folder.iterdir()) == [
        *(f"checkpoint-{step}" for step in (10, 12, 2, 4, 8)),
        "checkpoint-foo",
    ]


def test_a_folder_of_the_user_s_is_left_alone_and_never_deleted(tmp_path: Path) -> None:
    """Also where it has a checkpoint's name: what was begun as one is marked."""
    series = checkpoints_of(tmp_path)
    sealed(series, 2, 4)
    begin(series.path_of(6))  # and killed
    notes = series.path_of(7) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    said: list[str] = []
    assert newest_good(series, said.append) == series.path_of(4)
    assert said[0] == (
        f"{notes.parent} is no checkpoint of this package, and is left alone. If that step is "
        "saved, it gets the name checkpoint-7.kept"
    )
    assert said[1].startswith(f"a checkpoint is incomplete: {series.path_of(6)}")
    assert delete_old(series, Retention(keep_last=1)) == [series.path_of(2)]
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["checkpoint-4", "checkpoint-7"]
    assert notes.read_text() == "mine"


def test_what_is_the_user_s_makes_way_for_a_checkpoint_with_all_its_files(tmp_path: Path) -> None:
    """A folder, a file, a link and one that leads nowhere, also where the first name is taken."""
    series, elsewhere = checkpoints_of(tmp_path / "out"), tmp_path / "elsewhere"
    series.folder.mkdir()
    elsewhere.mkdir()
    place = series.path_of(2)

    def make_folder() -> None:
        place.mkdir()
        (place / "run.json").write_text("mine")

    makes: list[Callable[[], object]] = [
        make_folder,
        lambda: place.write_text("mine"),
        lambda: place.symlink_to(elsewhere),
        lambda: place.symlink_to(tmp_path / "nowhere"),
    ]
    said: list[str] = []
    for make in makes:
        make()
        keep_others(place, said.append)
        assert not os.path.lexists(place)
    kept = [place.with_name(f"checkpoint-2.kept{number}") for number in ("", "_2", "_3", "_4")]
    assert sorted(series.folder.iterdir()) == kept
    assert (kept[0] / "run.json").read_text() == kept[1].read_text() == "mine"
    assert [path.readlink() for path in kept[2:]] == [elsewhere, tmp_path / "nowhere"]
    names = [path.name for path in kept]
    assert said == [
        f"{place} was no checkpoint of this package: it is now {name}, with all its files"
        for name in names
    ]
    assert series.found() == series.aside() == []
    place.mkdir()  # an empty one has nothing to lose
    keep_others(place, said.append)
    begin(place)  # what a run has begun is written over
    keep_others(place, said.append)
    assert len(said) == 4
    assert sorted(series.folder.iterdir()) == [place, *kept]


def test_what_is_left_of_a_deletion_is_no_checkpoint_and_goes_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = checkpoints_of(tmp_path)
    sealed(series, 2, 4, 6)
    with monkeypatch.context() as patched:

        def killed(path: Path, **_: object) -> None:
            if path.exists():
                raise KeyboardInterrupt

        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_old(series, Retention(keep_last=2))
    assert [each.step for each in series.found()] == [4, 6]
    assert series.aside() == [series.path_of(2).with_name("checkpoint-2.incomplete")]
    delete_old(series, Retention(keep_last=2))
    assert series.aside() == []


def test_what_the_system_does_not_delete_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file on NFS that somebody has open."""
    series = checkpoints_of(tmp_path)
    sealed(series, 2, 4)
    with monkeypatch.context() as patched:

        def busy(path: object, *_: object, **__: object) -> None:
            raise OSError(16, "Device or resource busy", path)

        patched.setattr("os.unlink", busy)
        delete_old(series, Retention(keep_last=1))
    assert [each.step for each in series.found()] == [4]
