"""Processes with the environment that `accelerate launch` gives its children, which set up
torch.distributed through Accelerate; and FSDP2 on the CPU, where Accelerate has it on GPUs only."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from longctx_patch import LongContextConfig, make_accelerator
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


Job = tuple[Callable[..., Any], Sequence[Any]]
"""A function that sets up the launched processes, as a recipe does, and its arguments."""


def run_in_turn(num_processes: int, *jobs: Job, timeout_s: float = 240.0) -> list[list[Any]]:
    """The jobs one after the other in the same processes; for each its results by rank."""
    with held_ports(len(jobs)) as ports:
        by_rank = run_launched(_in_turn, num_processes, jobs, ports, timeout_s=timeout_s)
    return [list(found) for found in zip(*by_rank, strict=True)]


def _in_turn(jobs: Sequence[Job], ports: Sequence[int]) -> list[Any]:
    found = []
    for (function, args), port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(function(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return found


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


def fsdp2_on_cpu(config: LongContextConfig, precision: str = "no") -> Any:
    """An Accelerator of `make_accelerator` that takes its processes for ones under FSDP2."""
    accelerator: Any = make_accelerator(config, mixed_precision=precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    return accelerator


def whole(tensor: Any) -> Tensor:
    """All of a parameter of which each rank has a part; collective."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def has_part_of_gradient(parameter: Any) -> bool:
    """Whether a sharded parameter holds its rank's part of the gradient, and only this."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter.data, DTensor):
        return False
    local, mine = gradient.to_local(), parameter.data.to_local()
    return local.shape == mine.shape and local.numel() < parameter.numel()


def bits(tensor: Tensor) -> tuple[torch.dtype, bytes]:
    """What two tensors share only if they are equal to the last bit."""
    return tensor.dtype, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
