"""FSDP2 on the CPU through Accelerate, which shards over GPUs only."""

from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from longctx_patch import LongContextConfig, make_accelerator


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
