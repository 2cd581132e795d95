"""One job for one output, and what is taken over from a job that is over."""

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longctx_patch.checkpoints import lock
from longctx_patch.checkpoints.lock import LOCK_FILE, STALE_S, check_free, held, job_of
from tests.harness import run_distributed

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOOKS", 1)


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[Path]:
    """A folder whose lock is held by a process that is not the one named there."""
    path = leave(tmp_path / "held", HERE)
    process = subprocess.Popen(["flock", "--shared", "--no-fork", path, "sleep", "100"])
    while job_of(path.parent)[1] is False:
        time.sleep(0.01)
    yield path.parent
    process.kill()
    process.wait()


def leave(folder: Path, host: str, silent_s: float = 0.0) -> Path:
    """The lock file of a job."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    path.write_text(json.dumps({"host": host, "pid": 7, "launched": 0.0}))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def take(folder: Path) -> list[str]:
    """What is said while the lock is taken and given back."""
    said: list[str] = []
    with held(folder, launched=time.time(), say=said.append):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    return said


def refused(folder: Path, words: str) -> None:
    before = (folder / LOCK_FILE).read_bytes()
    for attempt in (check_free, take):
        with pytest.raises(ValueError, match=words):
            attempt(folder)
    assert (folder / LOCK_FILE).read_bytes() == before


def test_it_leaves_nothing_and_keeps_what_was_written(tmp_path: Path) -> None:
    assert take(tmp_path / "a" / "b") == []
    assert not list(tmp_path.iterdir())
    with held(tmp_path / "new", launched=time.time(), say=print):
        (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["metrics.jsonl"]


def test_two_jobs_at_once(tmp_path: Path) -> None:
    with held(tmp_path, launched=time.time(), say=print):
        refused(tmp_path, rf"process {os.getpid()} on .* launched at .* writes there")
    check_free(tmp_path)


def test_a_living_process_of_any_rank_is_refused(orphan: Path) -> None:
    """Also where the launcher and process 0 are gone: their orphans may still write."""
    refused(orphan, f"process 7 on {HERE}, .* or another one of its job, writes there")


def test_a_job_that_is_over_is_taken_over_aloud(tmp_path: Path) -> None:
    leave(tmp_path, HERE)
    check_free(tmp_path)
    (said,) = take(tmp_path)
    assert said.startswith("the lock of a job that is over is taken over: of process 7 on")
    (tmp_path / LOCK_FILE).write_text('{"host": "ho')  # cut off by a kill
    assert take(tmp_path) == []


@pytest.mark.parametrize("has_locks", [True, False])
def test_of_another_machine_the_last_touch_counts(
    tmp_path: Path, has_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may not be seen here. On a disk without locks this machine's own job counts so too.
    A touch that is ahead of this clock is refused as well."""
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.listdir("/not/there"))
    for silent_s in (STALE_S - 20, -7300):
        leave(tmp_path, HERE if not has_locks else "node7", silent_s)
        refused(tmp_path, r"process 7 on .*120 seconds after .* delete that file")
    leave(tmp_path, "node7", STALE_S + 20)
    (said,) = take(tmp_path)
    assert "of process 7 on node7" in said


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    """A link's target was once emptied and written over, and a pipe waited for."""
    path, precious = tmp_path / "out" / LOCK_FILE, tmp_path / "precious"
    path.parent.mkdir()
    precious.write_text("kept")
    make = {"link": lambda: path.symlink_to(precious), "folder": path.mkdir}
    make.get(kind, lambda: os.mkfifo(path))()
    for attempt in (check_free, take):
        with pytest.raises(ValueError, match=r"\.lock is no regular file.*remove it, or give"):
            attempt(path.parent)
    assert precious.read_text() == "kept"
    assert os.path.lexists(path)


def test_the_file_is_touched_while_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with held(tmp_path, launched=time.time(), say=print):
        path = tmp_path / LOCK_FILE
        os.utime(path, (1.0, 1.0))
        limit = time.monotonic() + 60
        while path.stat().st_mtime == 1.0:
            assert time.monotonic() < limit
            time.sleep(0.01)


def both_ranks(rank: int, folder: str) -> None:
    """All ranks hold it, and all are refused together."""
    path = Path(folder)
    time.sleep(0.2 * rank)  # process 0 waits until the others have looked
    check_free(path)
    with held(path, launched=time.time(), say=print):
        torch.distributed.barrier()
        if rank == 0:
            assert job_of(path)[1]
        torch.distributed.barrier()
    torch.distributed.barrier()
    if rank == 0:
        leave(path, "node7")
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="is in use"):
        take(path)


def test_all_ranks_hold_it_together(tmp_path: Path) -> None:
    run_distributed(both_ranks, 2, str(tmp_path / "out"))
