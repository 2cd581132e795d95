"""FSDP2's mixed precision without rounding what is reduced."""

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
