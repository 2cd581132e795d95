"""The batch on which the loss inside the head is compared with the loss from full logits."""

from torch import Tensor

from longctx_patch import PatchHandle
from tests.hf import steps
from tests.hf.tiny import token_rows

LENGTH = 19


def collated(handle: PatchHandle) -> dict[str, Tensor]:
    """Two rows, one of them without loss in its first part."""
    first, second = token_rows(LENGTH)
    return steps.collated(
        handle, [first, second | {"labels": [-100] * 8 + second["input_ids"][8:]}]
    )
