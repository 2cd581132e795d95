"""Checkpoints that can be trusted: sealed, checked, chosen and deleted in time."""
