"""Processes with the environment that `accelerate launch` gives its children, under a time limit.

They set up torch.distributed themselves, through Accelerate: that is what these tests are about.
"""

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from tests.harness import free_port


def run_launched(
    fn: Callable[..., Any], num_processes: int, *args: Any, timeout_s: float = 250
) -> list[Any]:
    """`fn(*args)` in every process; its results by rank. Raises with the tracebacks of all."""
    context = mp.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(num_processes)]
    processes = [
        context.Process(target=_child, args=(fn, rank, num_processes, port, sender, args))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        return _results([receiver for receiver, _ in pipes], time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(receivers: list[Connection], deadline: float) -> list[Any]:
    answers = [
        receiver.recv() if receiver.poll(max(0.0, deadline - time.monotonic())) else None
        for receiver in receivers
    ]
    failures = [
        f"rank {rank}: {'no answer in time' if answer is None else answer[1]}"
        for rank, answer in enumerate(answers)
        if answer is None or not answer[0]
    ]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [answer[1] for answer in answers if answer is not None]


def _child(
    fn: Callable[..., Any],
    rank: int,
    num_processes: int,
    port: int,
    sender: Connection,
    args: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # these tests are about the CPU, wherever they run
    }
    try:
        sender.send((True, fn(*args)))
    except Exception:
        sender.send((False, traceback.format_exc()))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
