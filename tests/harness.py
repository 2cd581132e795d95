"""Run a function on several processes of this machine, with a hard time limit.

    results = run_distributed(check_something, 4, "argument")

The function must be at module level; it is called as `function(rank, *args)` in every process
with torch.distributed initialised, and its results come back by rank. If any rank raises or the
limit passes, all are killed and the test fails with each rank's trace.
"""

import faulthandler
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """Results of `function(rank, *args)` by rank; with NCCL each rank has the GPU of its number."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        port = free_port()
        processes = [
            context.Process(
                target=_run_rank,
                args=(function, rank, world_size, port, folder, args, timeout_s, backend),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        timed_out = _wait(processes, timeout_s)
        outcomes = [_outcome(Path(folder), rank) for rank in range(world_size)]
        failures = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(outcomes) if text]
        if timed_out or failures:
            limit = f"time limit of {timeout_s} s passed\n" if timed_out else ""
            raise AssertionError(limit + "\n".join(failures))
        return [result for result, _ in outcomes]


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(processes: list[Any], timeout_s: float) -> bool:
    """Wait for all; kill all once one fails or the limit passes. True if it passed."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        failed = any(process.exitcode not in (None, 0) for process in processes)
        if failed or time.monotonic() > deadline:
            # A failing rank leaves its peers waiting; give them a moment to fail by themselves.
            time.sleep(1.0 if failed else 0.0)
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            return not failed
        time.sleep(0.02)
    return False


def _outcome(folder: Path, rank: int) -> tuple[Any, str]:
    result, error, stack = (folder / f"{rank}.{kind}" for kind in ("result", "error", "stack"))
    if result.exists():
        return pickle.loads(result.read_bytes()), ""
    if error.exists():
        return None, error.read_text()
    return None, "was killed; its stack at the limit:\n" + (
        stack.read_text() if stack.exists() else "unknown"
    )


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    args: tuple[Any, ...],
    timeout_s: float,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    stack = (Path(folder) / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(timeout_s * 0.9, file=stack)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank, *args)
        (Path(folder) / f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None
