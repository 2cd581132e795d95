"""All ranks of a group take one kernel, and fail together."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from longctx_patch.hf.call import meeting
from longctx_patch.kernels import AgreedKernels, Kernel, KernelRequest, available
from longctx_patch.kernels.select import agreement
from longctx_patch.kernels.select.agreement import agreed_kernel
from longctx_patch.kernels.select.preference import Preference
from longctx_patch.kernels.select.registry import candidates
from longctx_patch.transport import VirtualTransport, run_virtual_ranks

CPU = KernelRequest("cpu", torch.float32, 8)
NAMES = tuple(available())
WRONG = "gives wrong numbers (dq of the causal block is off by 0.9)"


@dataclass
class Scripted:
    """A rank whose neighbours have answered already."""

    others: list[tuple[int, ...]]
    group_rank: int = 0
    sent: list[Sequence[int]] = field(default_factory=list)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        self.sent.append(numbers)
        rows = [*self.others]
        rows.insert(self.group_rank, tuple(numbers))
        return rows


def answer(*accepted: str, order: Sequence[str] = (), tag: int = agreement._TAG) -> tuple[int, ...]:
    mask = sum(1 << NAMES.index(name) for name in accepted)
    row = [tag, mask, *(NAMES.index(name) for name in order)]
    return tuple(row + [-1] * (agreement._WIDTH - len(row)))


def agree(transport: Any, name: str = "auto", *order: str) -> Kernel:
    return agreed_kernel(
        name, CPU, transport, lambda *_: Preference(order or candidates(name, CPU), {})
    )


def test_rank_0_decides() -> None:
    def on_one_rank(rank: VirtualTransport) -> str:
        mine = ("torch_eager", "torch_cpu") if rank.group_rank == 0 else ("torch_cpu",)
        return agree(rank, "auto", *mine).name

    assert run_virtual_ranks(3, on_one_rank) == ["torch_eager"] * 3


def test_what_was_agreed_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = AgreedKernels(), []
    assert kernels.names == ()

    def agreed(name: str, request: KernelRequest, _: Any) -> Kernel:
        asked.append(request)
        return available()["torch_eager" if request.softcap else "torch_cpu"]

    monkeypatch.setattr(agreement, "agreed_kernel", agreed)
    gpu = CPU._replace(device_type="cuda")
    for request in (gpu, gpu._replace(softcap=True), gpu):
        kernels.agree("auto", request, Scripted([]))
    assert len(asked) == 2
    assert kernels.names == ("torch_cpu", "torch_eager")


def test_what_a_rank_cannot_run_is_not_taken() -> None:
    transport = Scripted([answer("torch_eager")])
    assert agree(transport, "auto", "torch_cpu", "torch_eager").name == "torch_eager"
    transport = Scripted([answer("torch_cpu", "torch_eager", order=["torch_eager"])], group_rank=1)
    assert agree(transport).name == "torch_eager"


def test_a_named_kernel_must_be_everywhere() -> None:
    assert agree(Scripted([answer("torch_cpu")]), "torch_cpu").name == "torch_cpu"
    with pytest.raises(ValueError, match=r"kernel='torch_cpu': other kernels .* rank\(s\) \[1\]"):
        agree(Scripted([answer()]), "torch_cpu")
    with pytest.raises(ValueError, match="cudnn: needs device cuda, tensors are on cpu"):
        agree(Scripted([answer("cudnn")]), "cudnn")


def test_a_kernel_that_is_wrong_on_one_rank_is_taken_on_none() -> None:
    def on_one_rank(rank: VirtualTransport, name: str) -> str:
        problems = {"torch_cpu": WRONG} if rank.group_rank == 1 else {}
        order = tuple(n for n in ("torch_cpu", "torch_eager") if n not in problems)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # rank 0 alone would warn
            return agreed_kernel(name, CPU, rank, lambda *_: Preference(order, problems)).name

    assert run_virtual_ranks(2, lambda rank: on_one_rank(rank, "auto")) == ["torch_eager"] * 2
    with pytest.raises(RuntimeError, match="kernel='torch_cpu'"):
        run_virtual_ranks(2, lambda rank: on_one_rank(rank, "torch_cpu"))


def test_a_kernel_that_is_wrong_here_is_refused_by_name_and_left_out_with_a_warning() -> None:
    def prefer(*_: object) -> Preference:
        return Preference(("torch_eager",), {"torch_cpu": WRONG})

    alone: Any = Scripted([])
    with pytest.raises(ValueError, match=r"torch_cpu: gives wrong numbers[^!]*of torch_eager"):
        agreed_kernel("torch_cpu", CPU, alone, prefer)
    with pytest.warns(RuntimeWarning, match="kernel torch_cpu gives wrong numbers"):
        assert agreed_kernel("auto", CPU, alone, prefer).name == "torch_eager"


def test_ranks_at_different_points_find_it_out() -> None:
    with pytest.raises(RuntimeError, match="at different points"):
        agree(Scripted([answer("torch_cpu", tag=2)]), "torch_cpu")
    assert agreement._TAG == meeting.Meeting.KERNEL
    assert agreement._WIDTH == meeting._WIDTH


def test_on_gpus_they_agree_once_and_on_cpu_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernels, transport = AgreedKernels(), Scripted([])
    request = KernelRequest("cuda", torch.float32, 24, num_rows=5000)
    assert kernels.known("torch_eager", request) is None
    for rows in (5000, 6000, 8192):
        found = kernels.agree("torch_eager", request._replace(num_rows=rows), transport)  # type: ignore[arg-type]
        assert found.name == "torch_eager"
    assert len(transport.sent) == 1
    assert kernels.known("torch_eager", request) is found
    kernels.agree("torch_eager", request._replace(pieces=True), transport)  # type: ignore[arg-type]
    assert len(transport.sent) == 2
    assert kernels.agree("auto", CPU, transport).name == "torch_cpu"  # type: ignore[arg-type]
    assert len(transport.sent) == 2
