"""Watches whether a run is still right: its numbers, its ranks, and its progress."""
