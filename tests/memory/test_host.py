"""Free memory of the host, read from control groups of versions 1 and 2."""

from pathlib import Path

import psutil
import pytest

from longctx_patch.memory import host
from longctx_patch.memory.host import Room, available_bytes, rooms_of_groups

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def rooms(tmp_path: Path, groups: str) -> list[Room]:
    (tmp_path / "cgroup").write_text(groups)
    return rooms_of_groups(tmp_path / "cgroup", tmp_path / "fs")


def test_every_group_above_counts(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}"
    write(tmp_path / "fs/job/step", max=8 * GIB, current=3 * GIB, stat=stat)
    write(tmp_path / "fs/job", max="max", current=9 * GIB, stat=stat)
    write(tmp_path / "fs", max=5 * GIB, current=7 * GIB, stat="anon 5")
    assert rooms(tmp_path, "0::/job/step\n") == [(6 * GIB, 8 * GIB), (0, 5 * GIB)]


def test_version_1_and_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    stat = f"total_inactive_file {GIB}"
    root = tmp_path / "fs/memory"
    write(root, limit_in_bytes=4 * GIB, usage_in_bytes=2 * GIB, stat=stat)
    groups = "9:pids:/a\n4:cpu,memory:/not/seen/here\n0::/a\n"
    assert rooms(tmp_path, groups) == [(3 * GIB, 4 * GIB)]
    write(root, limit_in_bytes=0x7FFFFFFFFFFFF000, usage_in_bytes=2 * GIB, stat=stat)
    assert rooms(tmp_path, groups) == []


def test_without_groups_it_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rooms_of_groups(Path("/does/not/exist")) == []
    monkeypatch.setattr(host, "rooms_of_groups", lambda: [])
    assert 0 < available_bytes() <= psutil.virtual_memory().total == host.total_bytes()
    monkeypatch.setattr(host, "rooms_of_groups", lambda: [host.Room(7, 60), host.Room(5, 90)])
    assert available_bytes() == 5
    assert host.total_bytes() == 60
