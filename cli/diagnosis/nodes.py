"""The processes of a launcher: every node's checks, and an exchange between all. Imports torch.

Every process starts a child for the meeting and kills it at the time limit, so a hang ends on every
rank. Facts go through the store in which torch's processes find each other, since that says who did
not come, and needs neither NCCL nor gloo.
"""

import os
import pickle
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from longctx_patch.cli.diagnosis.exchange import exchange, failure, success
from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.transport.processes import ProcessesFailedError, run_processes

_CAUSES = (
    "NCCL_DEBUG=INFO shows where it stops; usual causes: a firewall between nodes, a launcher that "
    "was not started on every node, or the wrong interface: export NCCL_SOCKET_IFNAME=NAME and "
    "GLOO_SOCKET_IFNAME=NAME"
)
_SHARE_OF_LIMIT = 0.9
"""The part of the limit after which a rank says who did not come."""


@dataclass(frozen=True)
class Place:
    """Holds what the launcher told this process."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    host: str
    meeting: tuple[str, str]
    """MASTER_ADDR and MASTER_PORT."""

    @property
    def speaks_for_node(self) -> bool:
        """One process of each node looks at the machine."""
        return self.local_rank == 0


@dataclass(frozen=True)
class Member:
    """Holds what a rank tells all others."""

    place: Place
    checks: tuple[Check, ...]
    versions: Mapping[str, str]
    has_gpu: bool
    """Whether it has a GPU that no other rank of its node has."""


def launched() -> Place | None:
    """This process's place; None without a launcher, or with one process.

    Raises ValueError if the launcher announced a world, and not all that torch needs for it.
    """
    given = os.environ
    if int(given.get("WORLD_SIZE", "1")) < 2:
        return None
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in given]:
        raise ValueError(
            f"WORLD_SIZE={given['WORLD_SIZE']}, but {', '.join(missing)} is not set. Start with "
            "torchrun or `accelerate launch`, or unset WORLD_SIZE to look at this machine alone."
        )
    return Place(
        rank=int(given["RANK"]),
        num_ranks=int(given["WORLD_SIZE"]),
        local_rank=int(given["LOCAL_RANK"]),
        local_ranks=int(given.get("LOCAL_WORLD_SIZE", given["WORLD_SIZE"])),
        host=platform.node(),
        meeting=(given["MASTER_ADDR"], given["MASTER_PORT"]),
    )


def member(place: Place, checks: list[Check], versions: Mapping[str, str]) -> Member:
    """Returns what this process tells the others."""
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_ranks
    return Member(place, tuple(checks), versions, has_gpu)


def check_world(mine: Member, limit_s: float) -> tuple[list[Member], list[Check]]:
    """(every rank, checks of all together); this rank alone if they did not come together.

    Ranks wait for each other up to the limit, and the exchange may take as long again.
    """
    place = mine.place
    who, limit_s = f"{place.num_ranks} processes", 2 * limit_s
    try:
        ((members, backend, rates),) = run_processes(_meet, 1, mine, limit_s, timeout_s=limit_s)
    except ProcessesFailedError as error:
        return [mine], [failure(error, f"{who} at {':'.join(place.meeting)}", _CAUSES, limit_s)]
    nodes = len({each.place.host for each in members})
    done = success(rates, f"{who} on {nodes} node(s), {backend}")
    return members, [check_versions(members), done]


def _meet(_: int, mine: Member, limit_s: float) -> tuple[list[Member], str, list[dict[str, float]]]:
    """Every rank's facts, the backend, and every rank's rates. In a child of each rank."""
    dist.destroy_process_group()  # the child's own, of one rank
    place, wait = mine.place, timedelta(seconds=_SHARE_OF_LIMIT * limit_s / 2)
    os.environ |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), place.meeting, strict=True))
    found, _, _ = next(dist.rendezvous("env://", place.rank, place.num_ranks, timeout=wait))
    store = dist.PrefixStore("longctx_doctor", found)
    members = _gather(store, "member", mine, place, wait)
    backend = "nccl" if all(each.has_gpu for each in members) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.num_ranks, timeout=wait
    )
    device = "cuda" if backend == "nccl" else "cpu"
    measured = exchange(place.rank, device, place.local_rank)
    rates = _gather(store, "rates", measured, place, wait)
    dist.barrier()  # nobody leaves, and takes the store along, while others read
    dist.destroy_process_group()
    return members, backend, rates


def _gather(store: Any, name: str, mine: Any, place: Place, wait: timedelta) -> list[Any]:
    """Every rank's object. Raises RuntimeError with the ranks that did not come in time."""
    store.set(f"{name}/{place.rank}", pickle.dumps(mine))
    absent, deadline = [], time.monotonic() + wait.total_seconds()
    for rank in range(place.num_ranks):
        try:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
            store.wait([f"{name}/{rank}"], left)
        except dist.DistStoreError:
            absent.append(rank)
    if absent:
        raise RuntimeError(f"rank(s) {absent} of {place.num_ranks} did not come")
    return [pickle.loads(store.get(f"{name}/{rank}")) for rank in range(place.num_ranks)]


def check_versions(members: list[Member]) -> Check:
    """Checks whether all ranks have the same versions: others compute other numbers, or hang."""
    by_versions: dict[str, list[int]] = {}
    for each in members:
        text = ", ".join(f"{name} {number}" for name, number in sorted(each.versions.items()))
        by_versions.setdefault(text, []).append(each.place.rank)
    if len(by_versions) == 1:
        return Check("same versions", "ok", f"on all {len(members)} ranks")
    texts = (f"ranks {ranks}: {text}" for text, ranks in by_versions.items())
    return Check("same versions", "failed", "; ".join(texts), "install the same on every node")
