"""Dense attention in one process, written independently of the package."""

import numpy as np
from torch import Tensor

from tests.masked import dense_masked


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, dq, dk, dv) of causal attention over BLHD tensors, through autograd in float64."""
    found = dense_masked(q, k, v, dout, np.tri(q.shape[1], dtype=np.bool_))
    return found["out"], found["lse"], found["dq"], found["dk"], found["dv"]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (absolute where that is zero)."""
    difference = (found.double() - wanted.double()).norm().item()
    scale = wanted.double().norm().item()
    return difference / scale if scale > 0 else difference
