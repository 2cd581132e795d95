"""Batches for sequence parallelism."""

from longctx_patch.data.collator import SHARD_KEY, SequenceShardCollator
from longctx_patch.data.packing import PackedRows, pack_rows

__all__ = ["SHARD_KEY", "PackedRows", "SequenceShardCollator", "pack_rows"]
