"""The messages that training sends, really sent between processes: numbers checked, and timed.

An all-reduce is what gradients take, an all-to-all what Ulysses takes, and messages to the next
rank and from the previous one are a ring. Rates are bus bandwidths as nccl-tests counts them: what
the slowest link of a rank carries in one direction. Imports torch.
"""

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.transport import Message, ProcessGroupTransport
from longctx_patch.transport.processes import ProcessesFailedError, run_processes

GB = 10**9
_GPU_BYTES, _CPU_BYTES = 2**28, 2**22
_WARM, _REPEATS = 5, 15
"""Calls before those that are timed, and these. NCCL's first calls on a sound host with four H100
took five times as long as later ones."""
STAGES = ("init_process_group", "rendezvous", "_all_reduce", "_all_to_all", "_ring")
"""Functions in which a rank may hang, in the order in which it runs them."""


class WrongNumbersError(RuntimeError):
    """What arrived is not what was sent."""


def exchange(rank: int, device_type: str, local_rank: int | None = None) -> dict[str, float]:
    """Run all three over the default group; the rates in GB/s. Collective.

    Raises WrongNumbersError on ranks where something else arrived than was sent.
    """
    on_gpu = device_type == "cuda"
    number = rank if local_rank is None else local_rank
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    group = dist.group.WORLD
    assert group is not None
    transport = ProcessGroupTransport(group, device)
    num_bytes = _GPU_BYTES if on_gpu else _CPU_BYTES
    ranks, size = transport.num_ranks, num_bytes / GB
    others = (ranks - 1) / ranks
    return {
        "all_reduce_gb_per_s": 2 * others * size / _all_reduce(transport, device, num_bytes),
        "all_to_all_gb_per_s": others * size / _all_to_all(transport, device, num_bytes),
        "ring_gb_per_s": size / _ring(transport, device, num_bytes),
    }


def _all_reduce(transport: ProcessGroupTransport, device: torch.device, num_bytes: int) -> float:
    ranks = transport.num_ranks
    sent = _pattern(num_bytes // 4, 0, 0, device).float() + transport.group_rank
    total = sent.clone()
    dist.all_reduce(total, group=transport.group)
    wanted = ranks * (sent - transport.group_rank) + ranks * (ranks - 1) / 2  # exact in float32
    _require_equal("all-reduce", total, wanted)
    return _seconds(partial(dist.all_reduce, total, group=transport.group), device)


def _all_to_all(transport: ProcessGroupTransport, device: torch.device, num_bytes: int) -> float:
    mine, ranks = transport.group_rank, transport.num_ranks
    sizes = [num_bytes // ranks] * ranks
    sent = torch.cat([_pattern(sizes[r], mine, r, device) for r in range(ranks)])
    arrived = torch.empty_like(sent)
    post = partial(transport.all_to_all, sent, sizes, arrived, sizes)
    post().wait()
    wanted = torch.cat([_pattern(sizes[r], r, mine, device) for r in range(ranks)])
    _require_equal("all-to-all", arrived, wanted)
    return _seconds(lambda: post().wait(), device)


def _ring(transport: ProcessGroupTransport, device: torch.device, num_bytes: int) -> float:
    mine, ranks = transport.group_rank, transport.num_ranks
    after, before = (mine + 1) % ranks, (mine - 1) % ranks
    sent = _pattern(num_bytes, mine, after, device)
    arrived = torch.empty_like(sent)
    post = partial(transport.exchange, [Message(after, sent)], [Message(before, arrived)])
    post().wait()
    _require_equal("ring", arrived, _pattern(num_bytes, before, mine, device))
    return _seconds(lambda: post().wait(), device)


def _pattern(size: int, source: int, target: int, device: torch.device) -> Tensor:
    """uint8 `[size]`, other values for every position, source and target."""
    numbers = torch.arange(size, dtype=torch.int32, device=device)
    return ((numbers + 31 * source + 17 * target) % 251).to(torch.uint8)


def _require_equal(what: str, arrived: Tensor, wanted: Tensor) -> None:
    wrong = int((arrived != wanted).sum())
    if wrong:
        raise WrongNumbersError(f"{what}: {wrong:,} of {wanted.numel():,} numbers are wrong")


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call."""
    for _ in range(_WARM):
        call()
    seconds = []
    for _ in range(_REPEATS):
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_exchange(num_gpus: int, limit_s: float, run: Callable[..., Any] = run_processes) -> Check:
    """Exchange between a process for each GPU or, with fewer than two GPUs, two on the CPU."""
    device, backend = ("cuda", "nccl") if num_gpus > 1 else ("cpu", "gloo")
    ranks = max(num_gpus, 2)
    try:
        rates = run(exchange, ranks, device, timeout_s=limit_s, backend=backend)
    except ProcessesFailedError as error:
        return failure(error, f"{ranks} processes, {backend}", _ALONE[backend], limit_s)
    return success(rates, f"{ranks} processes, {backend}")


def success(rates: list[dict[str, float]], who: str) -> Check:
    """The check of an exchange whose numbers are right; the slowest rank's rates."""
    slowest = {name: min(each[name] for each in rates) for name in rates[0]}
    shown = (f"{name.split('_gb')[0]} {rate:.3g}" for name, rate in slowest.items())
    text = f"{who}: numbers are right; GB/s: {', '.join(shown)}".replace("_", "-")
    return Check("exchange", "ok", text, figures=slowest)


def failure(error: ProcessesFailedError, who: str, fix: str, limit_s: float) -> Check:
    """The check of an exchange that hung, or in which a rank raised."""
    text = str(error)
    if not error.timed_out:
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt): .*", text, re.MULTILINE)
        why = raised[-1] if raised else text.strip().splitlines()[-1]
        return Check("exchange", "failed", f"{who}: {why}", fix)
    entered = [stage for stage in STAGES if f" in {stage}\n" in f"{text}\n"]
    where = f" in {entered[0].strip('_')}" if entered else ""
    return Check(
        "exchange", "failed", f"{who}: it hung{where}, and was ended at {limit_s:g} s", fix
    )


_ALONE = {
    "nccl": "NCCL_P2P_DISABLE=1 longctx doctor  # if this works, peer access is broken: switch "
    "IOMMU/ACS off in the firmware; else NCCL_DEBUG=INFO longctx doctor says where it stops",
    "gloo": "GLOO_SOCKET_IFNAME=lo longctx doctor  # if this works, the machine's name stands for "
    "an address that is not its own: correct /etc/hosts; else raise --limit on a busy machine",
}
"""What usually causes a hang or an error between processes of one machine, and how to find out."""
