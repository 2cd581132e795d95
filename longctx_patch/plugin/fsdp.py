"""FSDP2's gradients: reduced without rounding, and sharded between the forwards of a step."""

from typing import Any

import torch

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
