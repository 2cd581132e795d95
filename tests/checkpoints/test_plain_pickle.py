"""A pickle of os.system is refused before it runs, wherever torch would unpickle it."""

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from longctx_patch.checkpoints.manifest import MANIFEST, problems_of, seal
from longctx_patch.checkpoints.plain_pickle import MetadataReader, NotPlain, load_plain
from longctx_patch.checkpoints.series import Series, checkpoints_of, newest_good

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def states() -> dict[str, Any]:
    weights = {f"w{d}": torch.arange(6).to(d) for d in (torch.float32, torch.bfloat16, torch.int8)}
    return {"model": weights, "optimizer": {"lr": 0.1, "betas": (0.9, 0.95), "name": "adam"}}


@pytest.fixture
def series(tmp_path: Path) -> Series:
    found = checkpoints_of(tmp_path)
    for step in (1, 2):
        dcp.save(states(), checkpoint_id=found.path_of(step) / "state", no_dist=True)
        seal(found.path_of(step))
    return found


def test_what_torch_writes_is_read(series: Series) -> None:
    wanted = states()
    content: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in wanted["model"].items()},
        "optimizer": {"lr": 0.0, "betas": (0.0, 0.0), "name": ""},
    }
    load_plain(content, series.path_of(1) / "state")
    assert content["optimizer"] == wanted["optimizer"]
    for name, value in wanted["model"].items():
        assert torch.equal(content["model"][name], value)


def test_metadata_that_calls_is_refused_though_its_checksum_is_right(
    series: Series, tmp_path: Path
) -> None:
    marker, newest = tmp_path / "was_called", series.path_of(2)
    (newest / "state/.metadata").write_bytes(pickle.dumps(Evil(marker)))
    seal(newest)
    assert not problems_of(newest)
    with pytest.raises(NotPlain, match=r"names (posix|nt)\.system"):
        MetadataReader(newest / "state").read_metadata()
    said: list[str] = []
    assert newest_good(series, said.append) == series.path_of(1)
    assert "state/.metadata is not safe to read: it names posix.system" in said[0]
    assert not marker.exists()


def test_bytes_that_call_are_refused(series: Series, tmp_path: Path) -> None:
    """torch unpickles numbers of the optimizer, which lie among the tensors, without a limit."""
    marker, newest = tmp_path / "was_called", series.path_of(2)
    shutil.rmtree(newest)
    with_evil = {"optimizer": {"lr": Evil(marker)}}
    dcp.save(with_evil, checkpoint_id=newest / "state", no_dist=True)
    seal(newest)
    with pytest.raises((pickle.UnpicklingError, dcp.CheckpointException)):
        load_plain({"optimizer": {"lr": 0.0}}, newest / "state")
    said: list[str] = []
    assert newest_good(series, said.append) == series.path_of(1)
    assert "state/.metadata is not safe to read: optimizer.lr in __0_0.distcp" in said[0]
    assert not marker.exists()


def test_nothing_is_unpickled_of_a_file_with_another_checksum(
    series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_into: list[Path] = []

    def look(folder: Path) -> list[str]:
        looked_into.append(folder)
        return []

    monkeypatch.setattr("longctx_patch.checkpoints.series.not_plain", look)
    (series.path_of(2) / "state/.metadata").write_bytes(pickle.dumps(Evil(tmp_path / "x")))
    assert newest_good(series, lambda _: None) == series.path_of(1)
    assert looked_into == [series.path_of(1)]


def test_a_pickle_that_was_laid_beside_the_others_is_named(series: Series) -> None:
    """Some loaders take an optimizer.bin before what the checkpoint has."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    (series.path_of(2) / "optimizer.bin").write_bytes(buffer.getvalue())
    (series.path_of(2) / "notes.txt").write_text("mine")
    assert problems_of(series.path_of(2)) == [f"optimizer.bin is not in {MANIFEST}"]
