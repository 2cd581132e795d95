"""Reads what the launcher told this process: how many there are, and its switches."""

import os

# torchrun and `accelerate launch` first, then the MPI launchers that Accelerate understands.
WORLD_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def announced_processes() -> int:
    """The number of processes that the launcher announced, 1 without a launcher."""
    return next((int(os.environ[name]) for name in WORLD_VARIABLES if name in os.environ), 1)


def flag(name: str) -> bool:
    """Says whether an environment variable switches something on, as Accelerate reads it."""
    return os.environ.get(name, "false").lower() in ("true", "1", "yes", "on")
