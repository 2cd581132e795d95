"""Folders that a run writes to: whether it may, how much fits, and how fast."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from longctx_patch.diagnosis.check import Check

_CHUNK = 8 * 2**20
_MOST, _MOST_S = 64 * 2**20, 1.0
GB = 10**9
_LEAST, _SOON_FULL = 2 * GB, 50 * GB
"""A folder that is nearly full, and one that a few checkpoints of an 8B model fill."""
_SLOW = 0.1 * GB


@dataclass(frozen=True)
class Folder:
    """A folder as a run would find it."""

    purpose: str
    path: Path
    free_bytes: int = 0
    bytes_per_s: float | None = None
    problem: str | None = None
    """Why nothing can be written."""


def folders(out: Path) -> dict[str, Path]:
    """The folders that a run writes to, by purpose: its own, the models' cache, temporary files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return {"out": out, "model cache": Path(HF_HUB_CACHE), "temporary": Path(tempfile.gettempdir())}


def look_at(purpose: str, path: Path) -> Folder:
    """Write a few MiB where the folder is or would be made; nothing is left."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        rate = _write(there) if free > 2 * _MOST else None
    except OSError as error:
        return Folder(purpose, path, problem=f"{error.strerror} ({there})")
    return Folder(purpose, path, free, rate)


def _write(folder: Path) -> float:
    """Bytes per second that reach the disk; ends after about a second."""
    chunk, started, written = os.urandom(_CHUNK), time.perf_counter(), 0
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        while written < _MOST and time.perf_counter() - started < _MOST_S:
            written += file.write(chunk)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - started)


def check_disk(folder: Folder) -> Check:
    """Whether a run can write to the folder, and has room and speed for checkpoints there."""
    name, path = f"disk: {folder.purpose}", folder.path
    fix = {
        "out": "give a folder on another disk: --out FOLDER",
        "model cache": "export HF_HOME=FOLDER on another disk",
        "temporary": "export TMPDIR=FOLDER on another disk",
    }[folder.purpose]
    if folder.problem is not None:
        return Check(name, "failed", f"{path}: {folder.problem}", fix)
    text = f"{path}: {folder.free_bytes / GB:.1f} GB free"
    figures = {"free_gb": folder.free_bytes / GB}
    if folder.bytes_per_s is not None:
        text += f", writes {folder.bytes_per_s / GB:.2f} GB/s"
        figures["write_gb_per_s"] = folder.bytes_per_s / GB
    if folder.free_bytes < _LEAST:
        return Check(name, "failed", text, fix, figures)
    if folder.bytes_per_s is not None and folder.bytes_per_s < _SLOW:
        return Check(name, "warning", f"{text}: checkpoints will be slow", fix, figures)
    if folder.free_bytes < _SOON_FULL and folder.purpose != "temporary":
        return Check(name, "warning", f"{text}: an 8B model's checkpoints fill it", fix, figures)
    return Check(name, "ok", text, figures=figures)
