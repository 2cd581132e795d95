"""The loss law, and cross-entropy whose logits are never all held at once."""
