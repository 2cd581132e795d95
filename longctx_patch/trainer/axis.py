"""The sequence axis as a trainer has to see it: ranks with the same batch and the same loss.

Tensor-parallel ranks are such ranks, so the axis is NAMED "tp", and transformers divides its counts
of tokens, rows and ranks by `tp_size`. But `tp_enabled` stays False: nothing is cut by Accelerate,
and FSDP2 shards parameters over the axis as well.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from longctx_patch.config import LongContextConfig
from longctx_patch.plugin.parallelism import SequenceParallelismConfig, data_parallel_sizes
from longctx_patch.rules.launched import announced_processes, flag
from longctx_patch.rules.world import require_whole_groups

TRAINER_AXIS = "tp"


@dataclass(repr=False)
class TrainerParallelism(SequenceParallelismConfig):
    """SP x FSDP2, SP x HSDP, SP x DDP or SP alone, for `TrainingArguments(parallelism_config=...)`.

    `trainer_parallelism` makes it. `tp_size` is the sequence degree.

    Raises:
        ValueError: a size below 1, or `cp_size` or `sp_size` above 1.
    """

    tp_size: int = 1
    """Number of ranks that share a sequence."""
    cp_size: int = 1
    """1: context parallelism of Accelerate is not used."""

    def __post_init__(self) -> None:
        degree = self.tp_size
        if self.cp_size > 1:
            raise ValueError(
                f"cp_size={self.cp_size}: transformers would shard each batch by itself. Use "
                "trainer_parallelism(config), which calls the sequence axis tp_size."
            )
        self.tp_size = self.cp_size = 1
        super().__post_init__()
        if degree < 1:
            raise ValueError(f"tp_size={degree}: a size is 1 or more. Use tp_size=1.")
        self._set_size(TRAINER_AXIS, degree)

    @property
    def tp_enabled(self) -> bool:
        """False, whatever `tp_size`: the model's weights are not cut over the axis."""
        return False

    def _sequence_axes(self) -> list[str]:
        return [TRAINER_AXIS] if self.tp_size > 1 else []

    def check_world(self, num_processes: int, fsdp2: bool) -> None:
        """Raise ValueError unless the sizes multiply to the world and fit DDP or FSDP2."""
        require_whole_groups("tp_size", self.tp_size, num_processes)
        super().check_world(num_processes, fsdp2)

    def _wrong_product(self, num_processes: int) -> str:
        sizes = (self.dp_replicate_size, self.dp_shard_size, self.tp_size)
        return (
            f"dp_replicate_size={sizes[0]} x dp_shard_size={sizes[1]} x {sizes[2]} ranks per "
            f"sequence = {self.total_size}, but {num_processes} processes run: the sizes must "
            f"multiply to the number of processes. With {self.tp_size} ranks per sequence the "
            f"other two must multiply to {num_processes // self.tp_size}."
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the device mesh: Trainer writes its arguments to a file when it saves."""
        return self.__dict__ | {"device_mesh": None}


def trainer_parallelism(
    config: LongContextConfig,
    world: int | None = None,
    *,
    dp_replicate_size: int | None = None,
    dp_shard_size: int | None = None,
) -> TrainerParallelism:
    """The axis for `TrainingArguments(parallelism_config=...)` of transformers and TRL.

    With it a trainer gives the same rows to all ranks that share a sequence, and counts them as one
    replica. `LongContextTrainerMixin` sets it by itself, and also makes evaluation count each row
    once; without the mixin only training is exact.

    Args:
        config: degrees of sequence parallelism.
        world: number of processes; None: as many as run, or as the launcher announced.
        dp_replicate_size: ranks beside the sequence axis that hold copies of the model (DDP, HSDP).
        dp_shard_size: ranks beside it that shard the model (FSDP2). Without sizes they hold copies,
            and shard where `accelerate launch` switched FSDP on.

    Raises:
        ValueError: the processes are no multiple of the ranks per sequence, or the sizes don't
            multiply to them.

    Example:
        >>> args = TrainingArguments(parallelism_config=trainer_parallelism(config))
    """
    degree = config.sequence_degree
    world = num_processes() if world is None else world
    require_whole_groups(config.degrees_in_words, degree, world)
    replicate, shard = data_parallel_sizes(
        world // degree, dp_replicate_size, dp_shard_size, fsdp2=flag("ACCELERATE_USE_FSDP")
    )
    found = TrainerParallelism(
        dp_replicate_size=replicate, dp_shard_size=shard, tp_size=degree, cp_size=1, sp_size=1
    )
    found.check_world(world, fsdp2=shard > 1)
    return found


def num_processes() -> int:
    """Counts the processes of the world that runs, or that the launcher announced."""
    is_running = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_running else announced_processes()
