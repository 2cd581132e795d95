"""Whether GPUs can be used, are free, and reach each other."""

import os
import re

from longctx_patch.diagnosis.check import Check
from longctx_patch.diagnosis.gpus import Gpus

GIB = 2**30
_LEAST_CAPABILITY = (8, 0)
_MOSTLY_FREE = 0.9
_TORCH_SITE = "https://pytorch.org/get-started/locally"
_ORDINARY_CUDA = "13.0"
"""What `pip install torch` comes with, from 2.11 on."""


def check_torch(found: Gpus) -> Check:
    """Whether torch's build can use the GPUs that are there."""
    build = "for the CPU" if found.torch_cuda is None else f"for CUDA {found.torch_cuda}"
    text = f"torch {found.torch_version} {build}"
    driver = f"driver {found.driver} for CUDA up to {found.driver_cuda}"
    if found.driver is None:
        driver = "driver not known, since nvidia-smi is missing"
    if found.seen:
        return _check_architectures(found, f"{text}, {driver}")
    if found.driver_gpus and found.visible in ("", "-1"):
        hidden = f"{text}; CUDA_VISIBLE_DEVICES={found.visible!r} hides all GPUs"
        return Check("torch", "warning", hidden, "unset CUDA_VISIBLE_DEVICES")
    if found.driver_gpus and found.torch_cuda is None:
        beside = f"{text} beside {found.driver_gpus} GPU(s), {driver}"
        return Check("torch", "failed", beside, _reinstall(found))
    if found.driver_gpus and _too_old(found):
        return Check(
            "torch", "failed", f"{text} needs a newer driver than {driver}", _update(found)
        )
    if found.driver_gpus:
        fix = "run nvidia-smi, and restart the machine or the container if it shows errors"
        return Check("torch", "failed", f"{text}, {driver}: {found.torch_problem}", fix)
    if found.pci_gpus:
        fix = "install NVIDIA's driver; in a container: docker run --gpus all"
        there = f"{found.pci_gpus} NVIDIA GPU(s) are in this machine, but no driver answers"
        return Check("torch", "warning", there, fix)
    return Check("torch", "ok", text)


def _check_architectures(found: Gpus, text: str) -> Check:
    """Whether torch has code for each GPU: of its major version, or such as the driver compiles."""
    kinds = [re.fullmatch(r"(sm|compute)_(\d+)(\d)\w?", each) for each in found.architectures]
    built = [(each[1], int(each[2]), int(each[3])) for each in kinds if each]
    for gpu in found.seen:
        major, minor = gpu.capability
        runs = any(
            (m == major and n <= minor) if kind == "sm" else (m, n) <= gpu.capability
            for kind, m, n in built
        )
        if built and not runs:
            lacks = f"{text}: no code for {gpu.name} (compute capability {major}.{minor})"
            fix = f"install a torch that is built for sm_{major}{minor}: {_TORCH_SITE}"
            return Check("torch", "failed", lacks, fix)
    return Check("torch", "ok", text)


def _too_old(found: Gpus) -> bool:
    """Whether the driver is of an older major version of CUDA than torch: minor ones may differ."""
    wanted = found.torch_cuda or _ORDINARY_CUDA
    return found.driver_cuda is not None and _major(found.driver_cuda) < _major(wanted)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _reinstall(found: Gpus) -> str:
    return _update(found) if _too_old(found) else "pip uninstall -y torch && pip install torch"


def _update(found: Gpus) -> str:
    return f"install a newer driver, or a torch for CUDA {found.driver_cuda}: {_TORCH_SITE}"


def check_gpus(found: Gpus) -> Check:
    """Whether there are GPUs, of one kind, new enough and free."""
    if not found.seen:
        return Check("gpus", "warning", "none: runs use the CPU, which is for trying out")
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
        theirs = f" (on GPUs: {', '.join(found.others)})" if found.others else ""
        fix = "end what nvidia-smi lists, or choose others: export CUDA_VISIBLE_DEVICES=..."
        return Check("gpus", "warning", f"{text}; {', '.join(busy)}{theirs}", fix)
    if len(kinds) > 1:
        fix = "choose GPUs of one kind: export CUDA_VISIBLE_DEVICES=... (the slowest sets the pace)"
        return Check("gpus", "warning", text, fix)
    return Check("gpus", "ok", text)


def check_links(found: Gpus) -> Check:
    """How GPUs reach each other's memory."""
    if len(found.seen) < 2:
        return Check("gpu links", "skipped", "fewer than two GPUs")
    kinds = sorted(set((found.links or {}).values())) or ["kind unknown"]
    text = f"{', '.join(kinds)} between {len(found.seen)} GPUs"
    without = [f"{i}-{j}" for (i, j), can in (found.peers or {}).items() if not can and i < j]
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return Check(
            "gpu links", "warning", f"{text}; NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"
        )
    if without:
        text += f"; no peer access: {', '.join(without)}, so messages go through the host's memory"
        return Check("gpu links", "warning", text, "nvidia-smi topo -p2p r  # says why")
    return Check("gpu links", "ok", f"{text}, all with peer access")
