"""The batch on which the loss inside the head is compared with that from full logits."""

from torch import Tensor

from longctx_patch import PatchHandle, SequenceShardCollator
from tests.hf.tiny import token_rows

TOLERANCE = 1e-5
LENGTH = 19
Rows = list[dict[str, list[int]]]


def rows() -> Rows:
    """One of them without loss in its first part."""
    first, second = token_rows(LENGTH)
    return [first, second | {"labels": [-100] * 8 + second["input_ids"][8:]}]


def collated(handle: PatchHandle) -> dict[str, Tensor]:
    collate = SequenceShardCollator(handle.config, group_rank=handle.group_rank, pad_token_id=0)
    return collate(rows())
