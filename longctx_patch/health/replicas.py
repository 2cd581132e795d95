"""Detects replicas whose trained weights have diverged: within 25 steps, and before they are saved.

Every `EVERY` steps the device sums the bit patterns of the weights, in `PARTS` parts. Ranks
exchange these sums, and read them one step later, when they have arrived. So the host waits for
nothing. Before a checkpoint they are read at once, so that no checkpoint holds weights that have
diverged.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from longctx_patch.health.finite import OnTheWay, gathered
from longctx_patch.health.weights import own_part
from longctx_patch.rules.together import num_ranks, of_all_ranks

EVERY = 24
"""Steps between comparisons, each of which reads all trained weights once."""
PARTS = 24
"""Parts whose sums are exchanged; the weights of a part that differs are named."""
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
        self._copies = [r for r in range(num_ranks()) if named and owners.count(owners[r]) > 1]
        self._owners = owners
        self._parts = [named[part::PARTS] for part in range(min(PARTS, len(named)))]
        self._pending: tuple[int, OnTheWay] | None = None
        self._alike = step

    def after_step(self, step: int) -> None:
        """Call it after each optimizer step, on every rank.

        Raises:
            ReplicasDivergedError: on all ranks.
        """
        if self._copies:
            self._read()
            if step % EVERY == 0:
                self._send(step)

    def require_alike(self, step: int) -> None:
        """Compare all weights at once, which waits for the device. Call it before what is left of
        step number `step` is saved, on every rank.

        Raises:
            ReplicasDivergedError: on all ranks.
        """
        if self._copies:
            self._read()
            self._send(step)
            self._read()

    def _send(self, step: int) -> None:
        sums = [torch.stack([bit_sum(weight) for _, weight in part]).sum() for part in self._parts]
        self._pending = (step, OnTheWay(gathered(torch.stack(sums))))

    def _read(self) -> None:
        if self._pending is None:
            return
        (step, everyones), self._pending = self._pending, None
        rows = everyones.numbers().tolist()
        for owner in dict.fromkeys(self._owners):
            ranks = [rank for rank in self._copies if self._owners[rank] == owner]
            for part, weights in enumerate(self._parts):
                self._require_equal(step, {rank: rows[rank][part] for rank in ranks}, weights)
        self._alike = step

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
    """Returns which shard this rank holds: its coordinates in the axes that cut the parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    cuts = zip(place, parameter.placements, strict=False)
    return tuple(at for at, placement in cuts if not isinstance(placement, Replicate))
