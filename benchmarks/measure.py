"""What the benchmark scripts share: a process's start and end, clocks, and who measured what.

Python puts a script's folder on its path, so `from measure import ...` works in the scripts here.
A function whose docstring says "Collective" must be called by all ranks of the job.
"""

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

WARM_UP_CALLS = 3
PACKAGES = (
    "accelerate",
    "deepspeed",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "longctx-patch",
    "peft",
    "transformers",
    "triton",
    "trl",
    "unsloth",
)

Row = dict[str, Any]
"""What the JSON says of one measurement or fit."""


class Timing(NamedTuple):
    """How long a call took, over several calls, on the slowest rank."""

    seconds: float
    """Median."""
    p20_s: float
    p80_s: float


@dataclass(frozen=True)
class Clock:
    """Times calls on the device of this process. Every method but `warm_up` is collective."""

    device: torch.device
    iterations: int
    warm_up_calls: int = field(default=WARM_UP_CALLS, kw_only=True)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def warm_up(self, call: Callable[[], object]) -> None:
        """The first calls compile and allocate."""
        for _ in range(self.warm_up_calls):
            call()

    def device_time(self, call: Callable[[], object]) -> Timing:
        """Time from call to call, one straight after the other; on CPU each call alone."""
        self.warm_up(call)
        if not self.on_cuda:
            return self.host_time(call)
        self.meet()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.iterations + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize(self.device)
        return slowest([start.elapsed_time(stop) * 1e-3 for start, stop in pairwise(events)])

    def host_time(self, call: Callable[[], object]) -> Timing:
        """Time the launch of a warm call on an idle device; on CPU that is the whole call."""
        return slowest([self._host_s(call) for _ in range(self.iterations)])

    def meet(self) -> None:
        """Wait until every rank is here and its device is idle."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        self.line_up()
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def line_up(self) -> None:
        """Let ranks go on together: on CUDA their devices wait for each other, the hosts don't."""
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device=self.device))

    def _host_s(self, call: Callable[[], object]) -> float:
        self.meet()
        started = perf_counter()
        call()
        return perf_counter() - started


def slowest(seconds: Sequence[float]) -> Timing:
    """The largest of the ranks' quantiles. Collective."""
    mine = np.quantile(seconds, (0.5, 0.2, 0.8)).tolist()
    return Timing(*np.max(everyone(mine), axis=0).tolist())


def everyone(mine: Any) -> list[Any]:
    """Every rank's value, by rank. Collective."""
    ranks = [mine] * num_processes()
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    return ranks


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Whether this process is the one that prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def machine(device: torch.device) -> Row:
    """The machine and the versions that the numbers belong to."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "dtype": str(dtype_on(device)).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter here and are installed, by name."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def own_device() -> torch.device:
    """The GPU of this process, which becomes torch's current one; or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def start() -> torch.device:
    """This process's device, and under torchrun its process group."""
    device = own_device()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def finish() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
