"""Who shares a sequence with whom: the (data parallel, ring, Ulysses) cut of the world.

Ulysses ranks are consecutive, so that their all-to-all stays inside a node; a ring rank is one
Ulysses group; data-parallel replicas are outermost. The order is that of Accelerate's mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longctx_patch.config import LongContextConfig
from longctx_patch.kernels import AgreedKernels
from longctx_patch.rules.launched import announced_processes
from longctx_patch.rules.world import require_whole_groups
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout
from longctx_patch.transport import (
    Counters,
    ProcessGroupTransport,
    SoloTransport,
    Transport,
    VirtualTransport,
)
from longctx_patch.transport.meeting import Meeting, digest, meet, table


class WorldPlace(NamedTuple):
    """Says where this process stands."""

    data_parallel_rank: int
    group_rank: int
    """This process's rank within the group that shares its sequence."""
    data_parallel_size: int


@dataclass(frozen=True)
class SequenceGroup:
    """One rank's view of the group that shares its sequence."""

    config: LongContextConfig
    everyone: Transport
    """All ranks of the group, for meetings and not for data."""
    ring: Transport
    """Carries the inputs of a plan; `ring_results` carries what is computed from them."""
    ring_results: Transport
    ulysses: Transport
    counters: Counters
    kernels: AgreedKernels = field(default_factory=AgreedKernels, compare=False, repr=False)
    """The kernels that its ranks have agreed to compute with."""

    @property
    def num_ranks(self) -> int:
        return self.config.sequence_degree

    @property
    def group_rank(self) -> int:
        return self.ring.group_rank * self.ulysses.num_ranks + self.ulysses.group_rank

    def close(self) -> None:
        """Destroy the process groups. Collective; the group can't be used afterwards."""
        transports = (self.everyone, self.ring, self.ring_results, self.ulysses)
        for transport in {id(t): t for t in transports}.values():
            if isinstance(transport, ProcessGroupTransport):
                transport.close()

    def layout(self, row: int | Documents) -> Layout:
        """The placement of a row's tokens on the ranks, given its documents or its length."""
        return self.config.layout_of(Documents.one(row) if isinstance(row, int) else row)

    def require_shards(
        self,
        meeting: Meeting,
        documents: Documents,
        local_tokens: int,
        held: str,
        numbers: Sequence[int] = (),
        *,
        whole: str,
        fix: str,
    ) -> list[tuple[int, ...]]:
        """Check that all ranks hold shards of one row; return each one's `numbers`. Collective.

        Args:
            local_tokens: how many tokens this rank holds; it must be what the layout says.
            held: what must be the same on all ranks, in words.
            whole: what the ranks must hold shards of, in words.
            fix: what to do if they don't, in words.

        Raises:
            ValueError: on every rank, with a table of what each one holds.
        """
        same = digest(f"{documents.num_tokens} tokens, {held}")
        rows = meet(self.everyone, meeting, (same, local_tokens, *numbers))
        sizes = self.layout(documents).sizes
        if {row[0] for row in rows} == {same} and tuple(row[1] for row in rows) == sizes:
            return [row[2:] for row in rows]
        mine = f"{local_tokens} of {documents.num_tokens} tokens, {held}"
        raise ValueError(
            f"the {self.num_ranks} ranks of a sequence group must hold shards of {whole}:\n"
            f"{table(self.everyone, mine)}\n"
            f"The {self.config.placement_of(documents)} layout of {documents.num_tokens} tokens "
            f"in {len(documents.lengths)} documents gives the ranks {list(sizes)}. {fix}"
        )


def world_place(config: LongContextConfig) -> WorldPlace:
    """This process's place, from its global rank alone.

    Raises ValueError if the degrees don't fit the world that was started.
    """
    rank, world_size = _world()
    degree = config.sequence_degree
    announced = announced_processes()
    if degree > 1 and world_size == 1 < announced:
        raise ValueError(
            f"{config.degrees_in_words} = {degree} ranks per sequence, but torch.distributed isn't "
            f"set up, though the launcher started {announced} processes. Patch after "
            "make_accelerator(config), Accelerator() or TrainingArguments(...), each of which "
            "sets it up."
        )
    require_whole_groups(config.degrees_in_words, degree, world_size)
    return WorldPlace(rank // degree, rank % degree, world_size // degree)


def make_sequence_group(
    config: LongContextConfig, *, timeout: timedelta | None = None
) -> SequenceGroup:
    """Build this process's groups. Collective: every process of the world calls it.

    Args:
        config: the same on every rank.
        timeout: how long a rank waits for the others in an exchange, before torch.distributed
            raises on gloo, or ends the process on NCCL. None: as long as in the world's group,
            which `init_process_group(timeout=...)`, `TrainingArguments(ddp_timeout=...)` and
            Accelerate's `InitProcessGroupKwargs(timeout=...)` set.

    Raises:
        ValueError: on all ranks, if configs differ or don't fit the world.
    """
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout}: give a time above 0, such as timedelta(minutes=10).")
    place = world_place(config)
    _check_same_config(config)
    counters = Counters()
    if config.sequence_degree == 1:
        solo = SoloTransport(counters)
        return SequenceGroup(config, solo, solo, solo, solo, counters)
    shape = (place.data_parallel_size, config.ring_degree, config.ulysses_degree)
    ranks = torch.arange(dist.get_world_size()).view(shape)
    timeout = timeout or _timeout_of_world()
    everyone = _my_transport(ranks.flatten(1), counters, timeout)
    solo = SoloTransport(counters)
    if config.ring_degree == 1:
        return SequenceGroup(config, everyone, solo, solo, everyone, counters)
    rings = ranks.transpose(1, 2).flatten(0, 1)
    results = _my_transport(rings, counters, timeout)
    if config.ulysses_degree == 1:
        return SequenceGroup(config, everyone, everyone, results, solo, counters)
    ring = _my_transport(rings, counters, timeout)
    ulysses = _my_transport(ranks.flatten(0, 1), counters, timeout)
    return SequenceGroup(config, everyone, ring, results, ulysses, counters)


def _check_same_config(config: LongContextConfig) -> None:
    """Raise if configs differ between ranks, which would then wait for each other forever."""
    if _world()[1] == 1:
        return
    assert dist.group.WORLD is not None
    everyone = ProcessGroupTransport(dist.group.WORLD, _control_device())
    mine = digest(repr(config))
    if set(meet(everyone, Meeting.CONFIG, (mine,))) != {(mine,)}:
        found = table(everyone, repr(config))
        raise ValueError(
            f"the ranks have different LongContextConfigs:\n{found}\nGive all ranks the same one."
        )


def virtual_group(transport: VirtualTransport, config: LongContextConfig) -> SequenceGroup:
    """The groups of a virtual rank; all virtual ranks together share one sequence."""
    if transport.num_ranks != config.sequence_degree:
        raise ValueError(
            f"{transport.num_ranks} virtual ranks, but {config.degrees_in_words} = "
            f"{config.sequence_degree}. Run {config.sequence_degree} virtual ranks."
        )
    ring_rank, ulysses_rank = divmod(transport.group_rank, config.ulysses_degree)
    grid = torch.arange(transport.num_ranks).view(config.ring_degree, config.ulysses_degree)
    ring = _virtual_part(transport, grid[:, ulysses_rank])
    return SequenceGroup(
        config,
        transport,
        ring,
        ring,
        _virtual_part(transport, grid[ring_rank]),
        transport.counters,
    )


def _virtual_part(transport: VirtualTransport, members: torch.Tensor) -> Transport:
    if len(members) == 1:
        return SoloTransport(transport.counters)
    return transport.subgroup(members.tolist())


def _my_transport(groups: torch.Tensor, counters: Counters, timeout: timedelta) -> Transport:
    """Create every group (torch wants all processes to take part); keep the one we are in."""
    mine, _ = dist.new_subgroups_by_enumeration(
        groups.tolist(),
        timeout=timeout,
        pg_options=_group_options(timeout),
        group_desc="ranks that share a row and call the model together",  # NCCL's errors name it
    )
    return ProcessGroupTransport(mine, _control_device(), counters)


def _timeout_of_world() -> timedelta:
    """The time limit of the world's collectives, which `TrainingArguments(ddp_timeout=...)` sets. A
    new group would take torch's default."""
    assert dist.group.WORLD is not None
    found: timedelta = dist.group.WORLD._get_backend(_control_device()).options._timeout
    return found


def _group_options(timeout: timedelta) -> Any:
    """Gives transfers on NCCL priority over attention's kernels for multiprocessors: they need
    few, and other work waits for what they bring."""
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it differs
    return options


def _control_device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
