"""The host's memory, its shared memory and the limit of open files."""

import resource
import shutil
from math import inf
from pathlib import Path

from longctx_patch.diagnosis.check import Check
from longctx_patch.memory.host import available_bytes, total_bytes

GIB = 2**30
_PER_PROCESS = 4 * GIB
"""What a process takes for torch, CUDA and transformers before its share of a model."""
_LEAST_SHARED = GIB
_FEWEST_FILES = 1024
SHARED = Path("/dev/shm")


def read_memory() -> tuple[int, int]:
    """(available, total) bytes of the machine, or of the container that this process is in."""
    return available_bytes(), total_bytes()


def read_shared(folder: Path = SHARED) -> tuple[int, int] | None:
    """(free, total) bytes of shared memory; None where there is no such folder (macOS)."""
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total


def read_open_files() -> tuple[float, float]:
    """(soft, hard) limit of open files of a process, `inf` where there is none."""
    soft, hard = (
        inf if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def check_memory(available: int, total: int, num_processes: int) -> Check:
    """Whether the host has room for that many processes, without any model."""
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if available >= num_processes * _PER_PROCESS:
        return Check("host memory", "ok", text)
    needed = num_processes * _PER_PROCESS // GIB
    return Check(
        "host memory",
        "warning",
        f"{text}; {num_processes} processes take about {needed} GiB before the model",
        "end other programs, or give the job or container more memory (sbatch --mem, docker -m)",
    )


def check_shared(shared: tuple[int, int] | None) -> Check:
    """Whether NCCL and loaders have shared memory: containers have 64 MiB by default."""
    if shared is None:
        return Check("shared memory", "skipped", f"no {SHARED} here")
    free, total = shared
    text = f"{free / GIB:.2g} of {total / GIB:.2g} GiB free in {SHARED}"
    if free >= _LEAST_SHARED:
        return Check("shared memory", "ok", text)
    fix = (
        f"in a container: docker run --ipc=host (or --shm-size=16g); else remove files in {SHARED}"
    )
    return Check("shared memory", "warning", text, fix)


def check_open_files(soft: float, hard: float) -> Check:
    """Whether a process may open enough files; each connection to another rank is one."""
    text = f"{soft:,.0f} for each process"
    if soft >= _FEWEST_FILES:
        return Check("open files", "ok", text)
    fix = "raise nofile in /etc/security/limits.conf to 65536"
    if hard >= _FEWEST_FILES:
        fix = f"in the shell that starts the run: ulimit -n {min(hard, 65536):.0f}"
    return Check("open files", "warning", text, fix)
