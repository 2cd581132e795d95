"""Changes a model's layers: checkpointing, tiles, fused kernels, rehearsal."""
