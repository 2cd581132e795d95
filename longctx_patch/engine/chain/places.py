"""How far a tensor goes, for kernels that count places in memory with 32 bits.

Beyond that they compute other numbers, without an error.
"""

from torch import Tensor

MOST_PLACES = 2**31 - 1
"""With a sign: mamba-ssm to 2.3.2 at least (state-spaces/mamba#1015), and
flash-linear-attention before 0.6."""
MOST_UNSIGNED_PLACES = 2**32 - 1
"""Without one: causal-conv1d to 1.7 at least (Dao-AILab/causal-conv1d#114)."""


def extent(tensor: Tensor) -> int:
    """How far its last number is from its first one: more than it has, in a part of a wider one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in pairs)
