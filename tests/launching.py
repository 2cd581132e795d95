"""Programs are started as a user starts them, in an environment without a launcher's variables."""

import os
import subprocess
import sys
from pathlib import Path

OURS = ("ACCELERATE_", "PARALLELISM_")


def clean_environment() -> dict[str, str]:
    """That of a shell in which nothing was launched."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_module(folder: Path, *words: str) -> str:
    """What `python -m WORDS` in `folder` prints, on CPUs; a failure shows the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
