"""Batches for sequence parallelism."""

from longctx_patch.data.collator import SHARD_KEY, SequenceShardCollator

__all__ = ["SHARD_KEY", "SequenceShardCollator"]
