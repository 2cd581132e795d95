"""A job under torch's launcher in which a rank hangs ends soon, by name, with no process left."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parent / "stepping.py"
LIMIT_S = 60.0
"""Far above what a job takes here: 3 s of its step's limit, and its imports."""


class Ended(NamedTuple):
    code: int
    said: str


def ended(folder: Path) -> Ended:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [sys.executable, *words, str(SCRIPT), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=LIMIT_S)
        finally:
            job.kill()
    pids = [int(path.read_text()) for path in folder.glob("pid_*")]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    return Ended(job.returncode, said)


def is_alive(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and SCRIPT.name in command.read_text()


def test_a_rank_that_hangs_ends_the_job_by_name(tmp_path: Path) -> None:
    """Ranks that are stopped or killed, and launchers, are those of tests/faults."""
    job = ended(tmp_path)
    assert job.code != 0
    assert job.said.count("has taken longer than its limit of 3 s") >= 1
    guilty = r"rank 1 .* doesn't wait for others in step 5: at .*stepping.py:\d+ sleep_long"
    assert re.search(guilty, job.said), job.said
    assert "rank 0: step 5, all_reduce of torch.distributed, at " in job.said
    records = sorted(path.name for path in (tmp_path / "flight").iterdir())
    assert records == ["rank_0.json", "rank_1.json"]
