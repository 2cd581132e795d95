"""Folders that are full, slow or not writable."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.diagnosis import disk
from longctx_patch.diagnosis.disk import GB, Folder, check_disk, folders, look_at

GOOD = Folder("out", Path("run"), free_bytes=500 * GB, bytes_per_s=2e9)


def test_a_good_folder() -> None:
    check = check_disk(GOOD)
    assert (check.state, check.found) == ("ok", "run: 500.0 GB free, writes 2.00 GB/s")
    assert check.figures == {"free_gb": 500, "write_gb_per_s": 2}


def test_nothing_is_left_where_the_folder_is_not_made_yet(tmp_path: Path) -> None:
    found = look_at("out", tmp_path / "new" / "run")
    assert found.problem is None
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 10**6))
    found = look_at("model cache", tmp_path)
    assert found.bytes_per_s is None  # a disk that is nearly full is not filled
    check = check_disk(found)
    assert (check.state, check.fix) == ("failed", "export HF_HOME=FOLDER on another disk")


def test_a_folder_that_takes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**options: Any) -> Any:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(disk.tempfile, "NamedTemporaryFile", refuse)
    check = check_disk(look_at("out", tmp_path))
    assert check.state == "failed"
    assert "Read-only file system" in check.found
    assert "--out" in check.fix


def test_a_slow_disk_and_one_that_is_soon_full_are_warnings() -> None:
    slow = check_disk(replace(GOOD, bytes_per_s=2e7))
    assert (slow.state, "checkpoints will be slow" in slow.found) == ("warning", True)
    soon = replace(GOOD, free_bytes=20 * GB)
    assert check_disk(soon).state == "warning"
    assert check_disk(replace(soon, purpose="temporary")).state == "ok"


def test_the_folders_of_a_run() -> None:
    assert list(folders(Path("run"))) == ["out", "model cache", "temporary"]
