"""What the driver, the PCI bus and torch know of GPUs and the links between them."""

import os
import re
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from longctx_patch.health.rates import pci_of

_PCI = Path("/sys/bus/pci/devices")
_SMI_S = 20.0


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
    """What the machine, the driver and torch know of GPUs."""

    seen: tuple[Gpu, ...] = ()
    """Those that torch can use."""
    torch_version: str = torch.__version__
    torch_cuda: str | None = None
    """The CUDA version of torch's build; None: a build for the CPU."""
    architectures: tuple[str, ...] = ()
    """What torch was compiled for, such as sm_90."""
    torch_problem: str | None = None
    """What torch said when it could not use the GPUs."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver can run."""
    driver_gpus: int = 0
    pci_gpus: int = 0
    visible: str | None = None
    """The variable CUDA_VISIBLE_DEVICES, if it is set."""
    others: tuple[str, ...] = ()
    """Processes on GPUs, as the driver lists them."""
    peers: Mapping[tuple[int, int], bool] | None = None
    """Whether the first GPU of a pair can read the second one's memory."""
    links: Mapping[tuple[int, int], str] | None = None
    """NV4 (NVLink), PIX, SYS and so on, as `nvidia-smi topo -m` calls them."""


def nvidia_smi(*words: str) -> str | None:
    """What the driver's tool prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_SMI_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def read_gpus() -> Gpus:
    """Ask the driver, the PCI bus and torch."""
    rows = _table("--query-gpu=index,uuid,driver_version")
    numbers = {uuid.removeprefix("GPU-"): int(index) for index, uuid, _ in rows}
    cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", nvidia_smi() or "")
    seen, problem = _seen_by_torch()
    pairs = [(i, j) for i in range(len(seen)) for j in range(len(seen)) if i != j]
    apps = _table("--query-compute-apps=pid,used_memory,process_name") if rows else []
    return Gpus(
        seen=seen,
        torch_cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if seen else (),
        torch_problem=problem,
        driver=rows[0][2] if rows else None,
        driver_cuda=cuda and cuda[1],
        driver_gpus=len(rows),
        pci_gpus=_on_pci_bus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        others=tuple(
            f"{','.join(name)} ({pid}): {used}"
            for pid, used, *name in apps
            if pid != str(os.getpid())
        ),
        peers={pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs},
        links=links_of(nvidia_smi("topo", "-m") or "", [numbers.get(gpu.uuid) for gpu in seen]),
    )


def _table(query: str) -> list[list[str]]:
    text = nvidia_smi(query, "--format=csv,noheader") or ""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


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


def _on_pci_bus(devices: Path = _PCI) -> int:
    """NVIDIA's GPUs on the bus, also those without a driver (class 3: display controllers)."""
    found = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


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
