"""Gradients over ranks: DDP's buckets in the order that they keep, and FSDP2's reductions without
rounding.

DDP fills its buckets anew after its first backward, in the order in which gradients came. Four
ranks and more add an element in an order that depends on its place in a bucket. So the step after a
resumption would differ in last digits from the same step of a run that was not interrupted. A
backward of zeros before the first step lets DDP settle where no number depends on it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exact_mixed_precision(precision: str) -> Any:
    """FSDP2's `MixedPrecisionPolicy` with gradients reduced in float32, and outputs as they are.

    Accelerate's own policy rounds both to the low precision. None where `precision`, Accelerate's
    name of it, is none of `bf16` and `fp16`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision not in _DTYPES:
        return None
    return MixedPrecisionPolicy(param_dtype=_DTYPES[precision], reduce_dtype=torch.float32)


def keep_gradients_sharded(accelerator: Any) -> None:
    """Reduce gradients after every forward of a step, not after the last one only.

    Accelerate's `no_sync`, which trainers enter before all but the last forward, would save
    messages; but FSDP2 then keeps gradients whole, as many bytes as all trained weights take, on
    every rank until the last backward.
    """
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


class _Views(nn.Module):
    """Stands in for a model: a backward of what it gives reaches each parameter."""

    def forward(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [parameter.view_as(parameter) for parameter in parameters]


def settle_buckets(model: Any) -> None:
    """Settle the buckets of a model that DDP wraps, before its first step; others are left alone.

    Collective: all ranks reduce gradients of zeros once. Weights, random numbers and gradients stay
    what they are.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return  # DDP that looks for unused parameters keeps its first buckets
    inner = model.module
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    broadcasts = model.broadcast_buffers
    model.module, model.broadcast_buffers = _Views(), False  # which has none
    try:
        views = model(trained)  # an argument, since DDP of one GPU fails without any
    finally:
        model.module, model.broadcast_buffers = inner, broadcasts
    torch.autograd.backward(views, [torch.zeros_like(view) for view in views])
    for parameter in trained:
        parameter.grad = None


def settle_when_prepared(accelerator: Any) -> None:
    """Make `accelerator.prepare` settle the buckets of the models that it wraps."""
    prepare = accelerator.prepare

    def prepare_and_settle(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        for each in found if isinstance(found, tuple) else (found,):
            settle_buckets(each)
        return found

    accelerator.prepare = prepare_and_settle
