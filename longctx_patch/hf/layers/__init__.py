"""What the patch does to a model's layers: checkpointing, tiles, fused kernels, rehearsal."""
