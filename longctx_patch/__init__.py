"""Train Hugging Face models on very long sequences, with the numbers one GPU would give."""

from longctx_patch.attention import attention
from longctx_patch.config import LongContextConfig
from longctx_patch.data import SequenceShardCollator
from longctx_patch.groups import make_sequence_group, virtual_group, world_place
from longctx_patch.hf import PatchHandle, UnsupportedModelError, patch
from longctx_patch.loss import count_valid_tokens

__all__ = [
    "LongContextConfig",
    "PatchHandle",
    "SequenceShardCollator",
    "UnsupportedModelError",
    "attention",
    "count_valid_tokens",
    "make_sequence_group",
    "patch",
    "virtual_group",
    "world_place",
]
