"""One job for one output, and what is taken over from a job that is over."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from longctx_patch.recipes.saving import lock
from longctx_patch.recipes.saving.lock import LOCK_FILE, STALE_S, Job, Process, check_free, held
from tests.harness import run_distributed


@pytest.fixture
def other() -> Iterator[Process]:
    """Another process of this machine, which lives until the test ends."""
    process = subprocess.Popen(["sleep", "100"])
    started = psutil.Process(process.pid).create_time()
    yield Process(host=socket.gethostname(), pid=process.pid, started=started)
    process.kill()
    process.wait()


def leave(folder: Path, *processes: Process, silent_s: float = 0.0) -> Path:
    """The lock file of a job that was launched two hours ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    path.write_text(json.dumps(asdict(Job(processes=[*processes], launched=time.time() - 7300))))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def take(folder: Path) -> list[str]:
    """What is said while the lock is taken and given back."""
    said: list[str] = []
    with held(folder, launched=time.time(), say=said.append):
        (own,) = json.loads((folder / LOCK_FILE).read_text())["processes"]
        assert own["pid"] == os.getpid()
    return said


def test_it_leaves_nothing_and_keeps_what_was_written(tmp_path: Path) -> None:
    assert take(tmp_path / "a" / "b") == []
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    assert take(tmp_path / "mine") == []
    assert (tmp_path / "mine").is_dir()
    with held(tmp_path / "new", launched=time.time(), say=print):
        (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["metrics.jsonl"]


def test_a_living_process_of_any_rank_is_refused_by_name(tmp_path: Path, other: Process) -> None:
    """Also where the launcher and process 0 are gone: their orphans may still write."""
    gone = Process(host=other.host, pid=other.pid, started=other.started - 50)
    for processes in ((other,), (gone, other)):
        path = leave(tmp_path, *processes, silent_s=10 * STALE_S)
        before = path.read_bytes()
        words = rf"process {other.pid} on {other.host}, of the job .*launched 2 hours ago"
        for attempt in (lambda: check_free(tmp_path), lambda: take(tmp_path)):
            with pytest.raises(ValueError, match=words):
                attempt()
        assert path.read_bytes() == before


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """The first one's lock is on the file itself, so that they need not see each other's number."""
    with held(tmp_path, launched=time.time(), say=print):
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* writes there"):
            take(tmp_path)
        assert (tmp_path / LOCK_FILE).exists()


def test_a_job_that_is_over_is_taken_over_aloud(tmp_path: Path, other: Process) -> None:
    reused = Process(host=other.host, pid=other.pid, started=other.started - 50)
    never = Process(host=other.host, pid=2**22 + 7, started=1.0)
    for gone in (reused, never):
        leave(tmp_path, gone)
        check_free(tmp_path)
        (said,) = take(tmp_path)
        assert f"taken over: of process {gone.pid} on {gone.host}, launched 2 hours ago" in said
    (tmp_path / LOCK_FILE).write_text('{"processes": [{"ho')  # cut off by a kill
    assert take(tmp_path) == []


def test_of_another_machine_the_last_sign_counts(tmp_path: Path) -> None:
    far = Process(host="node7", pid=1, started=1.0)
    leave(tmp_path, far, silent_s=STALE_S - 20)
    with pytest.raises(ValueError, match=r"process 1 on node7.*120 seconds after its last sign"):
        take(tmp_path)
    leave(tmp_path, far, silent_s=STALE_S + 20)
    (said,) = take(tmp_path)
    assert "of process 1 on node7" in said


def test_a_sign_from_the_future_is_refused_with_what_to_do(tmp_path: Path) -> None:
    leave(tmp_path, Process(host="node7", pid=1, started=1.0), silent_s=-7300)
    words = rf"sign of process 1 on node7.* is 7[23]\d\d seconds ahead.*delete {tmp_path}/\.lock"
    for attempt in (check_free, take):
        with pytest.raises(ValueError, match=words):
            attempt(tmp_path)


@pytest.mark.parametrize("kind", ["a link to", "a folder", "no regular file"])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    """A link's target was once emptied and written over, and a pipe waited for."""
    path, precious = tmp_path / "out" / LOCK_FILE, tmp_path / "precious"
    path.parent.mkdir()
    precious.write_text("kept")
    make = {"a link to": lambda: path.symlink_to(precious), "a folder": path.mkdir}
    make.get(kind, lambda: os.mkfifo(path))()
    for attempt in (check_free, take):
        with pytest.raises(ValueError, match=rf"\.lock is {kind}.*remove it, or give another"):
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


def both_ranks(_: int, folder: str, held_by_other: bool) -> list[int]:
    """All ranks are refused together; else all are named in the lock."""
    path = Path(folder)
    if held_by_other:
        with pytest.raises(ValueError, match="is in use"):
            take(path)
        return []
    with held(path, launched=time.time(), say=print):
        content = json.loads((path / LOCK_FILE).read_text())
        torch.distributed.barrier()
    return [each["pid"] for each in content["processes"]]


def test_all_ranks_hold_it_together(tmp_path: Path, other: Process) -> None:
    mine, same = run_distributed(both_ranks, 2, str(tmp_path / "free"), False)
    assert len({*mine}) == 2
    assert mine == same
    leave(tmp_path / "used", other)
    run_distributed(both_ranks, 2, str(tmp_path / "used"), True)
