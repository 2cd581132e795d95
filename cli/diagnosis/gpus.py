"""Checks what the driver and torch know of GPUs and their links, and whether they can train."""

import os
import re
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.health.pace import pci_of

GIB = 2**30
_SMI_S = 20.0
_LEAST_CAPABILITY = (8, 0)
_MOSTLY_FREE = 0.9
_TORCH_SITE = "https://pytorch.org/get-started/locally"
_ORDINARY_CUDA = "13.0"
"""What `pip install torch` comes with, from 2.11 on."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as torch sees it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    uuid: str = ""
    pci: str = ""
    """Its place on the bus, as nvidia-smi takes it."""


@dataclass(frozen=True)
class Gpus:
    """Holds what the machine, the driver and torch know of GPUs."""

    seen: tuple[Gpu, ...] = ()
    """The GPUs that torch can use."""
    torch_version: str = torch.__version__
    torch_cuda: str | None = None
    """The CUDA version of torch's build; None: a build for the CPU."""
    torch_problem: str | None = None
    """What torch said when it could not use the GPUs."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver can run."""
    driver_gpus: int = 0
    visible: str | None = None
    """The variable CUDA_VISIBLE_DEVICES, if it is set."""
    peers: Mapping[tuple[int, int], bool] | None = None
    """Whether the first GPU of a pair can read the second one's memory."""
    links: Mapping[tuple[int, int], str] | None = None
    """NV4 (NVLink), PIX, SYS and so on, as `nvidia-smi topo -m` calls them."""


def nvidia_smi(*words: str) -> str | None:
    """Returns what the driver's tool prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_SMI_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def read_gpus() -> Gpus:
    """Ask the driver and torch."""
    text = nvidia_smi("--query-gpu=index,uuid,driver_version", "--format=csv,noheader") or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]
    numbers = {uuid.removeprefix("GPU-"): int(index) for index, uuid, _ in rows}
    cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", nvidia_smi() or "")
    seen, problem = _seen_by_torch()
    pairs = [(i, j) for i in range(len(seen)) for j in range(len(seen)) if i != j]
    return Gpus(
        seen=seen,
        torch_cuda=torch.version.cuda,
        torch_problem=problem,
        driver=rows[0][2] if rows else None,
        driver_cuda=cuda and cuda[1],
        driver_gpus=len(rows),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        peers={pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs},
        links=links_of(nvidia_smi("topo", "-m") or "", [numbers.get(gpu.uuid) for gpu in seen]),
    )


def _seen_by_torch() -> tuple[tuple[Gpu, ...], str | None]:
    """torch's GPUs, and why it can't use any."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            text = str(said[0].message) if said else "torch sees no GPU"
            return (), text.splitlines()[0]
    try:
        return tuple(map(_gpu, range(torch.cuda.device_count()))), None
    except RuntimeError as error:  # a GPU that has failed, or that another process has alone
        return (), str(error).splitlines()[0]


def _gpu(number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    uuid = str(getattr(properties, "uuid", ""))
    kind = (properties.major, properties.minor)
    return Gpu(properties.name, kind, total, free, uuid, pci_of(properties))


def links_of(topology: str, numbers: list[int | None]) -> dict[tuple[int, int], str]:
    """Links between GPUs by pairs of torch's numbers, from the driver's matrix.

    Args:
        topology: the output of `nvidia-smi topo -m`.
        numbers: the driver's number of each of torch's GPUs; None: it is not known.
    """
    plain = re.sub(r"\x1b\[\d*m", "", topology)  # its heading is underlined
    cells = {}
    for line in plain.splitlines():
        name, *row = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) and (not row or not row[0].startswith("GPU")):
            cells[int(name[3:])] = row
    return {
        (i, j): cells[first][second]
        for i, first in enumerate(numbers)
        for j, second in enumerate(numbers)
        if i != j and first in cells and second is not None and second < len(cells[first])
    }


def check_torch(found: Gpus) -> Check:
    """Checks whether torch's build can use the GPUs that are there."""
    build = "for the CPU" if found.torch_cuda is None else f"for CUDA {found.torch_cuda}"
    text = f"torch {found.torch_version} {build}"
    driver = f"driver {found.driver} for CUDA up to {found.driver_cuda}"
    if found.seen or not found.driver_gpus:
        return Check("torch", "ok", f"{text}, {driver}" if found.driver else text)
    if found.visible in ("", "-1"):
        hidden = f"{text}; CUDA_VISIBLE_DEVICES={found.visible!r} hides all GPUs"
        return Check("torch", "warning", hidden, "unset CUDA_VISIBLE_DEVICES")
    if _too_old(found):
        fix = f"install a newer driver, or a torch for CUDA {found.driver_cuda}: {_TORCH_SITE}"
        return Check("torch", "failed", f"{text} needs a newer driver than {driver}", fix)
    if found.torch_cuda is None:
        beside = f"{text} beside {found.driver_gpus} GPU(s), {driver}"
        return Check("torch", "failed", beside, "pip uninstall -y torch && pip install torch")
    fix = "run nvidia-smi, and restart the machine or the container if it shows errors"
    return Check("torch", "failed", f"{text}, {driver}: {found.torch_problem}", fix)


def _too_old(found: Gpus) -> bool:
    """Says whether the major version of the driver's CUDA is older than that of torch's."""
    wanted = found.torch_cuda or _ORDINARY_CUDA
    return found.driver_cuda is not None and _major(found.driver_cuda) < _major(wanted)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def check_gpus(found: Gpus) -> Check:
    """Checks whether there are GPUs, of one kind, new enough and free."""
    if not found.seen:
        fix = "in a container with GPUs: docker run --gpus all"
        return Check("gpus", "warning", "none: runs use the CPU, which is for trying out", fix)
    kinds = {(gpu.name, gpu.total_bytes // GIB, gpu.capability) for gpu in found.seen}
    text = ", ".join(
        f"{sum(gpu.name == name for gpu in found.seen)} x {name}, {size} GiB, compute capability "
        f"{major}.{minor}"
        for name, size, (major, minor) in sorted(kinds)
    )
    if min(gpu.capability for gpu in found.seen) < _LEAST_CAPABILITY:
        fix = "take GPUs of compute capability 8.0 or higher: no flash kernel runs on this one"
        return Check("gpus", "warning", text, fix)
    busy = [
        f"GPU {number} has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        for number, gpu in enumerate(found.seen)
        if gpu.free_bytes < _MOSTLY_FREE * gpu.total_bytes
    ]
    if busy:
        fix = "end what nvidia-smi lists, or choose others: export CUDA_VISIBLE_DEVICES=..."
        return Check("gpus", "warning", f"{text}; {', '.join(busy)}", fix)
    if len(kinds) > 1:
        fix = "choose GPUs of one kind: export CUDA_VISIBLE_DEVICES=... (the slowest sets the pace)"
        return Check("gpus", "warning", text, fix)
    return Check("gpus", "ok", text)


def check_links(found: Gpus) -> Check:
    """Checks how GPUs reach each other's memory."""
    if len(found.seen) < 2:
        return Check("gpu links", "skipped", "fewer than two GPUs")
    kinds = sorted(set((found.links or {}).values())) or ["kind unknown"]
    text = f"{', '.join(kinds)} between {len(found.seen)} GPUs"
    without = [f"{i}-{j}" for (i, j), can in (found.peers or {}).items() if not can and i < j]
    if without:
        text += f"; no peer access: {', '.join(without)}, so messages go through the host's memory"
        return Check("gpu links", "warning", text, "nvidia-smi topo -p2p r  # says why")
    return Check("gpu links", "ok", f"{text}, all with peer access")
