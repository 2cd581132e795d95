"""The device mesh of sequence parallelism, as Accelerate's ParallelismConfig.

The sequence axis is NAMED "cp", because Accelerate's data loaders give equal batches to the ranks
of an axis of that name (data_loader.py, prepare_data_loader). But `cp_enabled` stays False:
where it is True, `Accelerator.prepare` installs torch's own context parallelism, which allows
FSDP2 and plain causal attention only.

Ranks are ordered dp_replicate, dp_shard, cp (innermost), so that a sequence stays on one machine.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate import ParallelismConfig

from longctx_patch.rules.world import require_whole_groups

if TYPE_CHECKING:
    from accelerate import Accelerator

SEQUENCE_AXIS = "cp"
_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size")
_WHY_NOT = {
    "tp_size": "tensor parallelism cuts the attention heads, which the sequence axis also uses",
    "sp_size": "Accelerate's sp axis is DeepSpeed's, which replaces attention for every model",
}


@dataclass(repr=False)
class SequenceParallelismConfig(ParallelismConfig):
    """SP x FSDP2, SP x HSDP, SP x DDP or SP alone, for `Accelerator(parallelism_config=...)`.

    `cp_size` is the sequence degree. The product of the sizes is the number of processes.
    Under FSDP2 parameters are sharded over dp_shard x cp; otherwise every rank holds a copy.
    Gradients are averaged over all ranks either way, as the loss law assumes.

    A size left out is read from PARALLELISM_CONFIG_* as in the base class; `accelerate launch` sets
    these variables from YAML.

    Raises:
        ValueError: a size below 1, or `tp_size` or `sp_size` above 1.

    Example:
        >>> pc = SequenceParallelismConfig(cp_size=4, dp_shard_size=2)   # 8 ranks, FSDP2
        >>> accelerator = Accelerator(parallelism_config=pc, fsdp_plugin=plugin)
    """

    dp_replicate_size: int | None = None
    """Number of data-parallel groups that hold a copy of the model each. The other sizes are the
    base class's."""

    def __post_init__(self) -> None:
        self._fill_sizes_from_environment()
        replicate = self.dp_replicate_size
        # The base class refuses cp with copies and no shards (SP x DDP), as its own context
        # parallelism needs FSDP2. Ours does not, so this size is set after its check.
        self.dp_replicate_size = 1
        super().__post_init__()
        self._set_size("dp_replicate", replicate)
        self.cp_handler = None  # settings of the context parallelism that is not used

    def _fill_sizes_from_environment(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is None:
                size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
                setattr(self, name, size)
            if size < 1:
                raise ValueError(f"{name}={size}: a size is 1 or more. Use {name}=1.")
            if size > 1 and name in _WHY_NOT:
                raise ValueError(
                    f"{name}={size}: {_WHY_NOT[name]}. Use {name}=1 and set cp_size to the number "
                    f"of ranks that share a sequence (in YAML: parallelism_config_{name}: 1)."
                )

    @property
    def cp_enabled(self) -> bool:
        """False, whatever `cp_size`: Accelerate must not install its own context parallelism."""
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes whose ranks receive the same batch."""
        return self._sequence_axes()

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes over which FSDP2 shards parameters."""
        return (["dp_shard"] if self.dp_shard_enabled else []) + self._sequence_axes()

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes over which losses and gradients are averaged."""
        return self.dp_dim_names + self._sequence_axes()

    def _sequence_axes(self) -> list[str]:
        return [SEQUENCE_AXIS] if self.cp_size > 1 else []

    def check_world(self, num_processes: int, fsdp2: bool) -> None:
        """Raise ValueError unless the sizes multiply to the world and fit DDP or FSDP2."""
        require_whole_groups("cp_size", self.cp_size, num_processes)
        if self.total_size != num_processes:
            raise ValueError(self._wrong_product(num_processes))
        if self.dp_shard_enabled and not fsdp2:
            raise ValueError(
                f"dp_shard_size={self.dp_shard_size} without FSDP2: nothing would be sharded. Set "
                "distributed_type: FSDP and fsdp_version: 2 in the YAML, or use "
                f"dp_replicate_size={self.data_parallel_size}, dp_shard_size=1."
            )
        # A single process holds all shards.
        if fsdp2 and not self.dp_shard_cp_dim_names and num_processes > 1:
            raise ValueError(
                "FSDP2 with dp_shard_size=1 and cp_size=1: there are no ranks to shard over. Set "
                f"dp_shard_size to a divisor of {num_processes} processes above 1, or "
                "distributed_type: MULTI_GPU (one process: NO) in the YAML."
            )

    def _wrong_product(self, num_processes: int) -> str:
        sizes = (self.dp_replicate_size, self.dp_shard_size, self.cp_size)
        left = num_processes // self.cp_size
        return (
            f"dp_replicate_size={sizes[0]} x dp_shard_size={sizes[1]} x cp_size={sizes[2]} = "
            f"{self.total_size}, but {num_processes} processes run: the sizes must multiply to "
            f"the number of processes. With cp_size={self.cp_size} the other two must multiply to "
            f"{left}: dp_shard_size={left} under FSDP2, dp_replicate_size={left} without."
        )

    def _validate_accelerator(self, accelerator: "Accelerator") -> None:
        """Accelerate's hook, called once the world is known. Replaces the base class's checks."""
        self.check_world(accelerator.num_processes, accelerator.is_fsdp2)


def data_parallel_sizes(
    data_parallel: int, replicate: int | None, shard: int | None, *, fsdp2: bool
) -> tuple[int, int]:
    """(dp_replicate_size, dp_shard_size), with those that were not given filled in.

    The ranks beside the sequence axis shard parameters under FSDP2, and hold copies otherwise.
    """
    if shard is None:
        shard = max(1, data_parallel // (replicate or 1)) if fsdp2 else 1
    if replicate is None:
        replicate = max(1, data_parallel // shard)
    return replicate, shard
