"""The extent of a tensor, for kernels that count places in memory with 32 bits.

Beyond their limit such kernels compute other numbers, without an error.
"""

from torch import Tensor

MOST_PLACES = 2**31 - 1
"""The limit with a sign: of mamba-ssm to 2.3.2 at least (state-spaces/mamba#1015), and of
flash-linear-attention before 0.6."""
MOST_UNSIGNED_PLACES = 2**32 - 1
"""The limit without one: of causal-conv1d to 1.7 at least (Dao-AILab/causal-conv1d#114)."""


def extent(tensor: Tensor) -> int:
    """The distance of its last number from its first, in places of memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in pairs)
