"""The examples run as their docstrings say; `make demo` runs the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.timeout(150)
def test_import_and_patch_in_two_processes(tmp_path: Path) -> None:
    script = str(EXAMPLES / "import_and_patch.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run(tmp_path, *launcher, script)  # compares with the unpatched loss by itself
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes, losses" in done.stdout


def test_the_demo_leaves_a_folder_with_files_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run(tmp_path, str(EXAMPLES / "demo.py"), str(tmp_path))
    assert done.returncode == 1
    assert "demo: ok" not in done.stdout
    assert "holds files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
