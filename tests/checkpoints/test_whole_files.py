"""A folder is whole or not there: of a run that is ended while it writes it, nothing is loaded."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx_patch.checkpoints import whole_files
from longctx_patch.checkpoints.whole_files import name_problem, replaced


def content(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


def write(folder: Path, text: str) -> None:
    with replaced(folder) as beside:
        (beside / "new").write_text(text)
        (beside / "inner").mkdir()
        (beside / "inner/more").write_text(text)


def test_it_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    """Files of a model before, such as shards that the new one lacks, don't stay in it."""
    final = tmp_path / "final"
    write(final, "1")
    (final / "model-00002.safetensors").write_text("old")
    write(final, "2")
    assert content(final) == {"new": "2"}
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_paths_that_not_all_files_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not name_problem(Path("ünï"), "--out")
    said = name_problem(Path(os.fsdecode(b"/bad\xff")), "--out")
    assert said.startswith(r"--out '/bad\udcff': ")
    assert said.endswith("(utf-8) can write. Give another --out.")
    (bad := tmp_path / "bad\udcff").mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(bad)
        assert "bad\\udcff/out': the path" in name_problem(Path("out"), "--out")
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("ascii"))  # as in the C locale
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    said = name_problem(Path("/ünï"), "--out")
    assert said.startswith(r"--out '/\xfcn\xef': ")
    assert said.endswith("Give another --out, or start Python in UTF-8: PYTHONUTF8=1.")


def test_every_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync: Callable[[int], None] = os.fsync

    def noted(number: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path / "final", "1")
    assert sorted(synced[:3]) == ["inner", "more", "new"]
    assert synced[3:] == ["final.incomplete", tmp_path.name]


@pytest.mark.parametrize("name", ["final", "final.incomplete", "final.before"])
def test_a_file_or_a_link_in_its_place_goes(name: str, tmp_path: Path) -> None:
    """What a link leads to stays."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    for place in (lambda p: p.write_text("a file"), lambda p: p.symlink_to(elsewhere)):
        place(tmp_path / name)
        write(tmp_path / "final", "1")
        assert content(tmp_path / "final") == {"new": "1"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "final"]
        shutil.rmtree(tmp_path / "final")
    assert content(elsewhere) == {"kept": "kept"}


@pytest.mark.parametrize("moment", ["written", "exchanged"])
def test_an_end_at_any_moment_leaves_a_whole_folder_or_none(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "final"
    write(final, "1")
    with monkeypatch.context() as patched:
        name = {"written": "_sync", "exchanged": "sync_folder"}[moment]

        def ends(folder: Path) -> None:
            if moment == "written" or folder == tmp_path:
                raise KeyboardInterrupt

        patched.setattr(whole_files, name, ends)
        with pytest.raises(KeyboardInterrupt):
            write(final, "2")
    assert content(final) == {"new": "1" if moment == "written" else "2"}
    write(final, "3")
    assert content(final) == {"new": "3"}
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
