"""Folders that a run writes to: whether it may, how much fits, and how fast."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from longctx_patch.cli.diagnosis.packages import Check

GB = 10**9
_CHUNK = 8 * 2**20
_MOST, _MOST_S = 64 * 2**20, 1.0
_SLOW = 0.1 * GB
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to."""

    purpose: str
    path: Path
    least: float
    """A folder with less room fails."""
    soon_full: float
    """One with less is a warning: a few checkpoints of an 8B model fill it."""
    fix: str


def folders(out: Path) -> list[Folder]:
    """Lists the folders of a run: its own, the models' cache, temporary files, and shared memory,
    of which containers have 64 MiB unless told otherwise."""
    from huggingface_hub.constants import HF_HUB_CACHE

    elsewhere, cache, temporary = "on another disk", Path(HF_HUB_CACHE), Path(tempfile.gettempdir())
    found = [
        Folder("out", out, 2 * GB, 50 * GB, f"give a folder {elsewhere}: --out FOLDER"),
        Folder("model cache", cache, 2 * GB, 50 * GB, f"export HF_HOME=FOLDER {elsewhere}"),
        Folder("temporary", temporary, 2 * GB, 0, f"export TMPDIR=FOLDER {elsewhere}"),
    ]
    if SHARED.is_dir():
        fix = f"in a container: docker run --ipc=host; else remove files in {SHARED}"
        found.append(Folder("shared memory", SHARED, 0, GB, fix))
    return found


def check_disk(folder: Folder) -> Check:
    """Checks whether a run can write there and has room and speed for checkpoints; writes a few MiB
    where the folder is or would be made, and leaves nothing."""
    name, there = f"disk: {folder.purpose}", folder.path.absolute()
    while not there.exists():
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        rate = _write(there) if free > 2 * _MOST else None
    except OSError as error:
        return Check(name, "failed", f"{folder.path}: {error.strerror} ({there})", folder.fix)
    return judged(folder, free, rate)


def judged(folder: Folder, free_bytes: int, bytes_per_s: float | None) -> Check:
    """The check of a folder with this room and speed."""
    name, text = f"disk: {folder.purpose}", f"{folder.path}: {free_bytes / GB:.1f} GB free"
    figures = {"free_gb": free_bytes / GB}
    if bytes_per_s is not None:
        text += f", writes {bytes_per_s / GB:.2f} GB/s"
        figures["write_gb_per_s"] = bytes_per_s / GB
    if free_bytes < folder.least:
        return Check(name, "failed", text, folder.fix, figures)
    if bytes_per_s is not None and bytes_per_s < _SLOW:
        return Check(name, "warning", f"{text}: checkpoints will be slow", folder.fix, figures)
    if free_bytes < folder.soon_full:
        return Check(name, "warning", f"{text}: it is soon full", folder.fix, figures)
    return Check(name, "ok", text, figures=figures)


def _write(folder: Path) -> float:
    """Bytes per second that reach the disk; ends after about a second."""
    chunk, started, written = os.urandom(_CHUNK), time.perf_counter(), 0
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        while written < _MOST and time.perf_counter() - started < _MOST_S:
            written += file.write(chunk)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - started)
