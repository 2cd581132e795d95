"""Detects replicas whose trained weights have diverged: within 50 steps, and before they are saved.

Each step sums the bit patterns of a part of them, on the device; every `PARTS` steps ranks exchange
these sums, and read them one step later, when they have arrived. So the host waits for nothing.
Before a checkpoint all of them are summed and exchanged at once, so that no checkpoint holds
weights that have diverged.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from longctx_patch.health.finite import OnTheWay, gathered
from longctx_patch.health.weights import own_part
from longctx_patch.rules.together import num_ranks, of_all_ranks

PARTS = 24
"""Weights that differ since a step are summed within as many steps, exchanged within as many more,
and read one step later."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 3


class ReplicasDivergedError(RuntimeError):
    """Ranks that must have the same weights have different ones."""


class ReplicaCheck:
    """Compares the trained weights of the ranks that hold copies of them.

    Under DDP all ranks do. Under FSDP2 those do that hold the same shard, as HSDP's replicas; where
    each rank has a shard of its own there is nothing to compare.
    """

    def __init__(self, model: nn.Module, step: int = 0) -> None:
        """Collective over the world. The model is wrapped already, and has done `step` steps."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        shards = {_shard_of(parameter) for _, parameter in named}
        owners = of_all_ranks(repr(sorted(shards)))
        self._copies = [r for r in range(num_ranks()) if owners.count(owners[r]) > 1]
        self._owners = owners
        self._parts = _parts(named) if self._copies else []
        self._next = self._began = 0
        self._pending: tuple[int, OnTheWay] | None = None
        device = named[0][1].device if named else torch.device("cpu")
        self._sums = torch.zeros(PARTS, dtype=torch.int64, device=device)
        self._alike = step

    def after_step(self, step: int) -> None:
        """Call it after each optimizer step, on every rank.

        Raises:
            ReplicasDivergedError: on all ranks.
        """
        if not self._parts:
            return
        self._read()
        if self._next == 0:
            self._began = step
        self._sum(self._next)
        self._next = (self._next + 1) % PARTS
        if self._next == 0:
            self._send(step)

    def require_alike(self, step: int) -> None:
        """Compare all weights at once, which waits for the device. Call it before what is left of
        step number `step` is saved, on every rank.

        Raises:
            ReplicasDivergedError: on all ranks.
        """
        if not self._parts:
            return
        self._read()
        for part in range(PARTS):
            self._sum(part)
        self._next, self._began = 0, step
        self._send(step)
        self._read()

    def _sum(self, part: int) -> None:
        if weights := self._parts[part]:
            self._sums[part] = torch.stack([bit_sum(weight) for _, weight in weights]).sum()

    def _send(self, step: int) -> None:
        self._pending = (step, OnTheWay(gathered(self._sums)))

    def _read(self) -> None:
        if self._pending is None:
            return
        (step, everyones), self._pending = self._pending, None
        rows = everyones.numbers().tolist()
        for owner in dict.fromkeys(self._owners):
            ranks = [rank for rank in self._copies if self._owners[rank] == owner]
            for part, weights in enumerate(self._parts):
                self._require_equal(step, {rank: rows[rank][part] for rank in ranks}, weights)
        self._alike = self._began  # what differs once stays different

    def _require_equal(
        self, step: int, sums: dict[int, int], weights: Sequence[tuple[str, Tensor]]
    ) -> None:
        if len(set(sums.values())) <= 1:
            return
        values = list(sums.values())
        usual = max(dict.fromkeys(values), key=values.count)
        odd = [rank for rank, value in sums.items() if value != usual]
        names = ", ".join(name for name, _ in weights[:_SHOWN])
        more = f" and {len(weights) - _SHOWN} more" if len(weights) > _SHOWN else ""
        first = next(rank for rank, value in sums.items() if value == usual)
        raise ReplicasDivergedError(
            f"after step {step} the trained weights of rank {', '.join(map(str, odd))} are not "
            f"those of rank {first} any more, in {names}{more}. All of them were alike after step "
            f"{self._alike}, and nothing has been saved since: go on from the newest checkpoint "
            "(--resume), and check the devices and memory of these ranks."
        )


def bit_sum(weight: Tensor) -> Tensor:
    """The sum of the bit patterns of what this rank holds, an int64 scalar on its device: another
    number if a single bit differs."""
    held = own_part(weight)
    return held.view(_INTEGERS[held.dtype.itemsize]).sum(dtype=torch.int64)


def _shard_of(parameter: Tensor) -> tuple[int, ...]:
    """Which shard this rank holds: its coordinates in the axes that cut the parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    cuts = zip(place, parameter.placements, strict=False)
    return tuple(at for at, placement in cuts if not isinstance(placement, Replicate))


def _parts(named: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """The weights in `PARTS` parts of about equal size."""
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(PARTS)]
    sizes = [0] * PARTS
    for name, weight in sorted(named, key=lambda item: -item[1].numel()):
        least = sizes.index(min(sizes))
        parts[least].append((name, weight))
        sizes[least] += weight.numel()
    return parts
