"""Run a function on several processes of this machine, with a hard time limit."""

import faulthandler
import gc
import os
import pickle
import sys
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

GRACE_S = 1.0
"""Seconds that waiting ranks get to write their own traces after one rank failed."""

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "trl", "longctx_patch")
"""Packages whose modules take seconds to import, all together."""


class ProcessesFailedError(RuntimeError):
    """A rank raised or the time limit passed; the text holds each rank's trace."""

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *args: Any,
    timeout_s: float,
    backend: str = "gloo",
) -> list[Any]:
    """Results of `function(rank, *args)` by rank.

    `function` must be at module level. It runs with one thread and with torch.distributed
    initialised on loopback; with `backend="nccl"` each rank uses the GPU of its number. Arguments
    and result are pickled. What the function prints goes to stderr.

    Raises:
        ProcessesFailedError: a rank raised or time ran out. All processes are killed.

    Example:
        >>> run_processes(pow, 2, 3, timeout_s=60)  # doctest: +SKIP
        [0, 1]
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = forking(backend, function)
        deadline = time.time() + timeout_s
        job = (function, num_processes, folder, args, deadline, backend)
        processes = [
            context.Process(target=_run_rank, args=(rank, *job), daemon=True)
            for rank in range(num_processes)
        ]
        try:
            for process in processes:
                process.start()
            timed_out = _wait(processes, deadline)
        finally:  # also when interrupted
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        outcomes = [_outcome(folder, rank) for rank in range(num_processes)]
    failures = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(outcomes) if text]
    if failures:
        limit = f"the time limit of {timeout_s:g} s passed\n" if timed_out else ""
        raise ProcessesFailedError(limit + "\n".join(failures), timed_out=timed_out)
    return [result for result, _ in outcomes]


def forking(backend: str, function: Callable[..., Any]) -> Any:
    """Returns how processes start that run `function`: where it is safe, from a fork server which
    has imported what this process has of `PACKAGES` and of the function's own package.

    The server imports once, for this call and later ones; each spawned process would take seconds
    for it. CUDA does not survive a fork, nor do the libraries of macOS.
    """
    if backend == "nccl" or sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    packages = {*PACKAGES, function.__module__.partition(".")[0]} - {"__main__"}
    loaded = [name for name in sys.modules if name.partition(".")[0] in packages]
    context.set_forkserver_preload(loaded)  # read when the server starts, at the first call
    return context


def _wait(processes: list[Any], deadline: float) -> bool:
    """Wait until all have ended, one has failed or the limit has passed; True if the limit has."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(GRACE_S)
            return False
        if time.time() > deadline:
            return True
        time.sleep(0.02)
    return False


def _outcome(folder: Path, rank: int) -> tuple[Any, str]:
    """(result, "") or (None, why there is none)."""
    result, error, stack = (folder / f"{rank}.{kind}" for kind in ("result", "error", "stack"))
    if result.exists():
        return pickle.loads(result.read_bytes()), ""
    if error.exists():
        return None, error.read_text()
    trace = stack.read_text() if stack.exists() else ""
    return None, f"was killed without a result; {trace or 'no trace was written.'}"


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    num_processes: int,
    folder: Path,
    args: tuple[Any, ...],
    deadline: float,
    backend: str,
) -> None:
    gc.freeze()  # keeps modules loaded before the fork out of collections
    os.dup2(2, 1)  # stdout belongs to the parent, who may be writing JSON to it
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    stack = (folder / f"{rank}.stack").open("w")
    remaining_s = max(deadline - time.time(), 1.0)  # imports have taken some of the limit
    faulthandler.dump_traceback_later(0.9 * remaining_s, file=stack)
    try:
        dist.init_process_group(
            backend,
            init_method=(folder / "meeting").as_uri(),  # a port could be taken by another process
            rank=rank,
            world_size=num_processes,
            timeout=timedelta(seconds=remaining_s + 30.0),
        )
        result = pickle.dumps(function(rank, *args))
        if dist.is_initialized():  # `function` may have destroyed the group itself
            dist.barrier()
        _write(folder / f"{rank}.result", result)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        _write(folder / f"{rank}.error", traceback.format_exc().encode())
        raise SystemExit(1) from None


def _write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all: the process may be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)
