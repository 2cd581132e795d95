"""Folders that are full, slow or not writable."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.cli.diagnosis import writable
from longctx_patch.cli.diagnosis.writable import GB, Folder, check_disk, judged

OUT = Folder("out", Path("run"), 2 * GB, 50 * GB, "--out FOLDER")


def test_room_and_speed() -> None:
    check = judged(OUT, 500 * GB, 2e9)
    assert (check.state, check.found) == ("ok", "run: 500.0 GB free, writes 2.00 GB/s")
    assert check.figures == {"free_gb": 500, "write_gb_per_s": 2}
    slow = judged(OUT, 500 * GB, 2e7)
    assert (slow.state, "checkpoints will be slow" in slow.found) == ("warning", True)
    assert judged(OUT, 20 * GB, 2e9).state == "warning"
    assert judged(OUT, GB, None).state == "failed"


def test_nothing_is_left_where_the_folder_is_not_made_yet(tmp_path: Path) -> None:
    check = check_disk(replace(OUT, path=tmp_path / "new" / "run", least=0, soon_full=0))
    assert check.state in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_not_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 10**6))
    monkeypatch.setattr(writable, "_write", None)  # calling it would raise
    check = check_disk(replace(OUT, path=tmp_path))
    assert (check.state, check.fix) == ("failed", "--out FOLDER")


def test_a_folder_that_takes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**options: Any) -> Any:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(writable.tempfile, "NamedTemporaryFile", refuse)
    check = check_disk(replace(OUT, path=tmp_path))
    assert check.state == "failed"
    assert "Read-only file system" in check.found
