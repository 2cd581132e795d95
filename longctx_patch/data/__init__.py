"""Batches for sequence parallelism."""

from longctx_patch.data.collator import SequenceShardCollator
from longctx_patch.data.descriptor import SHARD_KEY
from longctx_patch.data.packing import PackedRows, pack_lengths, pack_rows

__all__ = [
    "SHARD_KEY",
    "PackedRows",
    "SequenceShardCollator",
    "pack_lengths",
    "pack_rows",
]
