"""The wheel, as `make wheel` builds it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "longctx_patch", "cli", "recipes")


def build_wheel(folder: Path) -> Path:
    """Builds a wheel out of a source archive out of a copy of the sources, without network."""
    copy = folder / "sources"
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copy],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path
