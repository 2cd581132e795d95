"""What the driver and torch say of GPUs, faked where this machine has none."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx_patch.cli.diagnosis import gpus as reader
from longctx_patch.cli.diagnosis.gpus import (
    Gpu,
    Gpus,
    check_gpus,
    check_links,
    check_torch,
    links_of,
    read_gpus,
)

GIB = 2**30
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
PAIRS = ((0, 1), (1, 0))
GOOD = Gpus(
    seen=(H200, H200),
    torch_version="2.13.0",
    torch_cuda="13.0",
    driver="580.1",
    driver_cuda="13.0",
    driver_gpus=2,
    peers=dict.fromkeys(PAIRS, True),
    links=dict.fromkeys(PAIRS, "NV18"),
)
NONE = Gpus(torch_problem="torch sees no GPU")
TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tPHB\tSYS\t0-31
GPU2\tSYS\tPHB\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_without_gpus() -> None:
    assert check_torch(NONE).state == "ok"
    assert check_gpus(NONE).state == "warning"
    assert check_links(NONE).state == "skipped"


def test_a_cpu_build_of_torch_beside_gpus() -> None:
    found = replace(NONE, driver_gpus=4, driver="580.1", driver_cuda="13.0")
    check = check_torch(found)
    assert (check.state, check.fix) == ("failed", "pip uninstall -y torch && pip install torch")
    assert "for the CPU beside 4 GPU(s)" in check.found
    old = check_torch(replace(found, driver_cuda="12.4"))
    assert old.fix.startswith("install a newer driver, or a torch for CUDA 12.4: https://pytorch")


def test_a_driver_that_is_older_than_torchs_cuda() -> None:
    found = replace(GOOD, seen=(), driver="550.5", driver_cuda="12.4")
    check = check_torch(found)
    assert check.state == "failed"
    assert "for CUDA 13.0 needs a newer driver than driver 550.5 for CUDA up to" in check.found
    minor = check_torch(replace(found, torch_cuda="12.8", torch_problem="CUDA error: 802"))
    assert "CUDA error: 802" in minor.found  # minor versions go together


def test_gpus_that_are_hidden() -> None:
    hidden = check_torch(replace(GOOD, seen=(), visible=""))
    assert (hidden.state, hidden.fix) == ("warning", "unset CUDA_VISIBLE_DEVICES")


def test_busy_old_and_mixed_gpus_are_warnings() -> None:
    busy = replace(H200, free_bytes=20 * GIB)
    check = check_gpus(replace(GOOD, seen=(H200, busy)))
    assert check.state == "warning"
    assert "GPU 1 has 20.0 of 140.0 GiB free" in check.found
    old = check_gpus(replace(GOOD, seen=(replace(H200, capability=(7, 0)),)))
    assert "8.0 or higher" in old.fix
    mixed = check_gpus(replace(GOOD, seen=(H200, replace(H200, name="NVIDIA H100"))))
    assert mixed.found.startswith("1 x NVIDIA H100, 140 GiB")
    assert "of one kind" in mixed.fix


def test_links_without_peer_access() -> None:
    check = check_links(replace(GOOD, peers=dict.fromkeys(PAIRS, False), links={}))
    assert check.state == "warning"
    assert "no peer access: 0-1" in check.found


def test_links_are_those_of_torchs_numbers() -> None:
    assert links_of(TOPOLOGY, [2, 0]) == {(0, 1): "SYS", (1, 0): "SYS"}
    assert links_of(TOPOLOGY, [0, 1])[0, 1] == "NV18"
    assert links_of(TOPOLOGY, [1, None]) == {}
    assert links_of("", [0, 1]) == {}


def test_gpus_are_read_from_driver_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test of the reader with GPUs: answers are those of nvidia-smi and torch."""
    answers: Mapping[tuple[str, ...], str] = {
        (): "| NVIDIA-SMI 580.65  Driver Version: 580.65  CUDA Version: 13.0 |",
        ("topo", "-m"): TOPOLOGY,
        ("--query-gpu=index,uuid,driver_version", "--format=csv,noheader"): (
            "0, GPU-aa, 580.65\n1, GPU-bb, 580.65\n2, GPU-cc, 580.65\n"
        ),
    }
    uuids = ["cc", "aa"]  # as CUDA_VISIBLE_DEVICES=2,0 orders them

    def properties(number: int) -> Any:
        return SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid=uuids[number])

    monkeypatch.setattr(reader, "nvidia_smi", lambda *words: answers[words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (5 * GIB, 9 * GIB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i < j)
    found = read_gpus()
    assert [gpu.uuid for gpu in found.seen] == uuids
    assert found.seen[0].free_bytes == 5 * GIB
    assert (found.driver, found.driver_cuda, found.driver_gpus) == ("580.65", "13.0", 3)
    assert found.peers == {(0, 1): True, (1, 0): False}
    assert found.links == {(0, 1): "SYS", (1, 0): "SYS"}


def test_a_gpu_that_has_failed_is_a_problem_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(number: int) -> Any:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    monkeypatch.setattr(reader, "nvidia_smi", lambda *words: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", failing)
    found = read_gpus()
    assert (found.seen, found.driver) == ((), None)
    assert found.torch_problem == "CUDA error: uncorrectable ECC error encountered"


def test_good_gpus() -> None:
    states = [check(GOOD).state for check in (check_torch, check_gpus, check_links)]
    assert states == ["ok"] * 3
    assert check_gpus(GOOD).found == "2 x NVIDIA H200, 140 GiB, compute capability 9.0"
    assert check_links(GOOD).found == "NV18 between 2 GPUs, all with peer access"
