"""Checks whether a machine, or the processes of a launcher, can train, and says what mends it."""
