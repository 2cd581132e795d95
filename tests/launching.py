"""Programs are started as a user starts them, in an environment without a launcher's variables."""

import os
import subprocess
import sys
from pathlib import Path

OURS = ("ACCELERATE_", "PARALLELISM_")


def run_module(folder: Path, *words: str) -> str:
    """What `python -m WORDS` in `folder` prints, on CPUs; a failure shows the end of its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
