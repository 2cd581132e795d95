"""Decides what layers keep for backward, what they recompute, and how much of it exists at once.

Import from the modules: `policies` and `host` need no torch.
"""
