"""Hugging Face models: what a family is, one forward pass over a shard, its layers and its loss."""
