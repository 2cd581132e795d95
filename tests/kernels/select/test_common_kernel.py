"""All ranks of a group take one kernel, and fail together."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from longctx_patch.kernels import AgreedKernels, Kernel, KernelRequest, available
from longctx_patch.kernels.select import common_kernel
from longctx_patch.kernels.select.common_kernel import agreed_kernel
from longctx_patch.kernels.select.preference import Preference
from longctx_patch.kernels.select.registry import candidates
from longctx_patch.transport import SoloTransport, VirtualTransport, run_virtual_ranks

CPU = KernelRequest("cpu", torch.float32, 8)
WRONG = "gives wrong numbers (dq of the causal block is off by 0.9)"


@dataclass
class Counted(SoloTransport):
    """A single rank that counts its collective meetings."""

    times: int = 0

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        self.times += 1
        return super().all_gather_numbers(numbers)


def agree(*lacks: str, name: str = "auto", rank_0_prefers: str | None = None) -> list[str]:
    """The kernel that each of two ranks takes, or its error; rank 1 lacks the kernels `lacks`."""

    def on_one_rank(rank: VirtualTransport) -> str:
        order = candidates(name, CPU)
        if rank.group_rank == 0 and rank_0_prefers is not None:
            order = (rank_0_prefers, *order)
        missing = dict.fromkeys(lacks if rank.group_rank == 1 else (), WRONG)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # rank 0 alone would warn
            try:
                return agreed_kernel(name, CPU, rank, lambda *_: Preference(order, missing)).name
            except ValueError as error:
                return str(error)

    return run_virtual_ranks(2, on_one_rank)


def test_rank_0_decides_among_those_that_all_have() -> None:
    assert agree() == ["torch_cpu"] * 2
    assert agree(rank_0_prefers="torch_eager") == ["torch_eager"] * 2
    assert agree("torch_cpu") == ["torch_eager"] * 2


def test_a_named_kernel_must_be_everywhere() -> None:
    assert agree(name="torch_cpu") == ["torch_cpu"] * 2
    there, here = agree("torch_cpu", name="torch_cpu")
    assert "torch_cpu: gives wrong numbers (dq" in here
    assert there == f"rank 1 of the group refused: {here}"
    for error in agree(name="cudnn"):
        assert "cudnn: needs device cuda, tensors are on cpu" in error


def test_ranks_without_a_kernel_in_common_are_named() -> None:
    def on_one_rank(rank: VirtualTransport) -> str:
        mine = "torch_eager" if rank.group_rank else "torch_cpu"
        missing = {name: WRONG for name in candidates("auto", CPU) if name != mine}
        preference = Preference((mine,), missing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="other kernels") as caught:
                agreed_kernel("auto", CPU, rank, lambda *_: preference)
        return str(caught.value)

    found = run_virtual_ranks(2, on_one_rank)
    assert [f"rank(s) [{other}]" in said for said, other in zip(found, (1, 0), strict=True)]


def test_what_was_agreed_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = AgreedKernels(), []
    assert kernels.names == ()

    def agreed(name: str, request: KernelRequest, _: Any) -> Kernel:
        asked.append(request)
        return available()["torch_eager" if request.softcap else "torch_cpu"]

    monkeypatch.setattr(common_kernel, "agreed_kernel", agreed)
    gpu = CPU._replace(device_type="cuda")
    for request in (gpu, gpu._replace(softcap=True), gpu):
        kernels.agree("auto", request, SoloTransport())
    assert len(asked) == 2
    assert kernels.names == ("torch_cpu", "torch_eager")


def test_a_kernel_that_is_wrong_here_is_refused_by_name_and_left_out_with_a_warning() -> None:
    def prefer(*_: object) -> Preference:
        return Preference(("torch_eager",), {"torch_cpu": WRONG})

    alone = SoloTransport()
    with pytest.raises(ValueError, match=r"torch_cpu: gives wrong numbers[^!]*of torch_eager"):
        agreed_kernel("torch_cpu", CPU, alone, prefer)
    with pytest.warns(RuntimeWarning, match="kernel torch_cpu gives wrong numbers"):
        assert agreed_kernel("auto", CPU, alone, prefer).name == "torch_eager"


def test_heads_beyond_every_fused_kernel_compute_in_chunks_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 4 has heads of 512 in its global layers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    request = KernelRequest("cuda", torch.bfloat16, 512)
    with pytest.warns(RuntimeWarning, match="bfloat16 with head dim 512 on cuda: .* 64 MiB"):
        assert agreed_kernel("auto", request, SoloTransport()).name == "torch_eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreed_kernel("torch_eager", request, SoloTransport())  # which was asked for


def test_on_gpus_they_agree_once_and_on_cpu_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernels, transport = AgreedKernels(), Counted()
    request = KernelRequest("cuda", torch.float32, 24, num_rows=5000)
    assert kernels.known("torch_eager", request) is None
    for rows in (5000, 6000, 8192):
        found = kernels.agree("torch_eager", request._replace(num_rows=rows), transport)
        assert found.name == "torch_eager"
    assert transport.times == 1
    assert kernels.known("torch_eager", request) is found
    kernels.agree("torch_eager", request._replace(pieces=True), transport)
    assert transport.times == 2
    assert kernels.agree("auto", CPU, transport).name == "torch_cpu"
    assert transport.times == 2
