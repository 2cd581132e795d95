"""Jobs under torch's launcher in which a rank or the launcher comes to grief: each ends soon, says
which rank it was, and leaves no process behind."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parent / "stepping.py"
LIMIT_S = 60.0
"""Far above what a job takes here: 3 s of its step's limit, and its imports."""


class Ended(NamedTuple):
    code: int
    said: str
    folder: Path


def start(folder: Path, what: str) -> "subprocess.Popen[str]":
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *words, str(SCRIPT), str(folder), what],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(folder: Path, what: str) -> Ended:
    with start(folder, what) as job:
        try:
            said, _ = job.communicate(timeout=LIMIT_S)
        finally:
            job.kill()
    assert_no_process_is_left(folder)
    return Ended(job.returncode, said, folder)


def assert_no_process_is_left(folder: Path) -> None:
    """Within the time limit: an orphan notices within a beat."""
    pids = [int(path.read_text()) for path in folder.glob("pid_*")]
    assert len(pids) == 2
    deadline = time.monotonic() + LIMIT_S
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(0.05)
    assert not left


def is_alive(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and SCRIPT.name in command.read_text()


@pytest.mark.parametrize(
    ("what", "guilty"),
    [
        ("stop", r"rank 1 .* was stopped by a signal; last seen in step [345]\."),
        ("sleep", r"rank 1 .* doesn't wait for others in step 5: at .*stepping.py:\d+ sleep_long"),
    ],
)
def test_a_rank_that_hangs_ends_the_job_by_name(what: str, guilty: str, tmp_path: Path) -> None:
    job = ended(tmp_path, what)
    assert job.code != 0
    assert job.said.count("has taken longer than its limit of 3 s") >= 1
    assert re.search(guilty, job.said), job.said
    assert "rank 0: step 5, all_reduce of torch.distributed, at " in job.said
    records = sorted(path.name for path in (tmp_path / "flight").iterdir())
    assert records == (["rank_0.json"] if what == "stop" else ["rank_0.json", "rank_1.json"])


def test_a_rank_that_is_killed_ends_the_job_by_name(tmp_path: Path) -> None:
    job = ended(tmp_path, "kill")
    assert job.code != 0
    pid = (tmp_path / "pid_1").read_text()
    gone = (
        f"rank 1 (process {pid}) is gone, last seen in step 5; rank 0 failed in step 5: all_reduce"
    )
    assert gone in job.said


def test_orphans_of_a_killed_launcher_end(tmp_path: Path) -> None:
    with start(tmp_path, "nothing") as job:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (tmp_path / "going").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert (tmp_path / "going").exists()
        finally:
            job.kill()
        assert_no_process_is_left(tmp_path)
        assert job.stdout is not None
        assert job.stdout.read().count("its launcher is gone") >= 1
