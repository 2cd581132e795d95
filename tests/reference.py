"""How far a tensor is from a reference."""

from torch import Tensor


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (absolute where that is zero)."""
    difference = (found.double() - wanted.double()).norm().item()
    scale = wanted.double().norm().item()
    return difference / scale if scale > 0 else difference
