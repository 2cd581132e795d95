"""Distributed tests run in processes of this machine; a hang ends with each rank's traceback."""

from collections.abc import Callable
from typing import Any

from longctx_patch.transport.processes import run_processes


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    backend: str = "gloo",
) -> list[Any]:
    """`run_processes` with a time limit that suits a test."""
    return run_processes(function, world_size, *args, timeout_s=timeout_s, backend=backend)
