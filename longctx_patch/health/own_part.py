"""What this rank holds of a tensor that may be cut over ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part, without a copy. Detached, since checkpointing counts what is saved for
    backward."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
