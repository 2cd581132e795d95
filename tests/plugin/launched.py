"""Processes with the environment that `accelerate launch` gives its children.

The processes set up torch.distributed themselves, through Accelerate, which is under test.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from longctx_patch.rules.launched import flag
from tests.harness import run_distributed
from tests.meeting import ENVIRONMENT, held_ports


def run_launched(
    fn: Callable[..., Any], num_processes: int, *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """`fn(*args)` in every process; its results by rank. Raises with the tracebacks of all."""
    with held_ports(1) as (port,):
        job = (fn, num_processes, port, args)
        return run_distributed(_child, num_processes, *job, timeout_s=timeout_s)


def _child(
    rank: int, fn: Callable[..., Any], num_processes: int, port: int, args: tuple[Any, ...]
) -> Any:
    dist.barrier()  # a rank that leaves the group early would break others' connections
    dist.destroy_process_group()  # at its end the harness uses Accelerate's group
    os.environ |= ENVIRONMENT | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # these tests use the CPU on every machine
    }
    return fn(*args)


@contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Within it Accelerate shards weights over CPUs too (FSDP2), where it would ignore FSDP."""
    usual = PartialState.__init__

    def init(state: PartialState, *args: Any, **kwargs: Any) -> None:
        usual(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    with (
        patch.object(PartialState, "__init__", init),
        patch(
            "longctx_patch.plugin.accelerator._uses_fsdp2",
            lambda plugin, cpu: plugin is not None or flag("ACCELERATE_USE_FSDP"),
        ),
    ):
        yield
