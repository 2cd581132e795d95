"""A manifest is the last that a checkpoint gets, when all else is on disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longctx_patch.checkpoints.manifest import MANIFEST, begin, problems_of, seal


def test_files_names_and_then_the_manifest_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power at any moment a manifest stands for files that are there in full."""
    folder, done = tmp_path / "checkpoint-2", list[tuple[str, str]]()
    begin(folder)
    for name in ("run.json", "state/__0_0.distcp", "model/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)

    def noted(what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = first if what == "name" else os.readlink(f"/proc/self/fd/{first}")
            done.append((what, os.path.relpath(path, tmp_path)))
            return act(first, *rest, **options)

        return call

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("name", os.replace))
    monkeypatch.setattr(os, "rename", noted("name", os.rename))
    seal(folder)
    inner = ("model", "state")
    files = ("model/config.json", "run.json", "state/__0_0.distcp")
    assert sorted(done[:3]) == [("sync", f"checkpoint-2/{name}") for name in files]
    assert sorted(done[3:5]) == [("sync", f"checkpoint-2/{name}") for name in inner]
    assert done[5:] == [
        ("sync", f"checkpoint-2/{MANIFEST}.tmp"),
        ("name", f"checkpoint-2/{MANIFEST}.tmp"),
        ("sync", "checkpoint-2"),
        ("sync", "."),
    ]
    assert problems_of(folder) == []
