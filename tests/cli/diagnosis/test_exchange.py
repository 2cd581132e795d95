"""Real exchanges between two processes: right, wrong, hanging and failing ones."""

import time
from functools import partial
from typing import Any

import torch

from longctx_patch.cli.diagnosis import exchange as module
from longctx_patch.cli.diagnosis.exchange import check_exchange, exchange
from longctx_patch.cli.diagnosis.packages import Check
from longctx_patch.transport import ProcessGroupTransport
from longctx_patch.transport.processes import run_processes
from longctx_patch.transport.protocol import Done

LIMIT_S = 200.0


def instead(function: Any) -> Any:
    """`run_processes` with another function in place of the exchange."""
    return lambda _, *args, **options: run_processes(function, *args, **options)


def flip_a_number(rank: int, device: str) -> dict[str, float]:
    """A ring in which one byte changes on its way to rank 1."""
    real = ProcessGroupTransport.exchange

    def broken(self: Any, sends: Any, receives: Any) -> Any:
        real(self, sends, receives).wait()
        receives[0].tensor[7] += rank
        return Done()

    ProcessGroupTransport.exchange = broken  # type: ignore[method-assign]
    return exchange(rank, device)


def hang_in_the_ring(rank: int, device: str) -> dict[str, float]:
    if rank == 1:
        module._ring = lambda *args: time.sleep(600)  # type: ignore[assignment]
    return exchange(rank, device)


def test_a_wrong_number_is_found() -> None:
    check = check_exchange(0, LIMIT_S, instead(flip_a_number))
    assert check.state == "failed"
    assert "WrongNumbersError: ring: 1 of 4,194,304 numbers are wrong" in check.found


def test_a_hang_ends_at_the_limit_and_is_named() -> None:
    """On a busy machine the shorter limits may pass before the ranks have started."""
    check_exchange(0, LIMIT_S)  # loads what later processes fork from
    for limit_s in (2, 8, 32):
        check = check_exchange(0, limit_s, instead(hang_in_the_ring))
        assert check.state == "failed"
        assert f"and was ended at {limit_s} s" in check.found
        assert check.fix.startswith("GLOO_SOCKET_IFNAME=lo longctx doctor")
        if "it hung in ring" in check.found:
            return
    raise AssertionError(check)


def test_each_gpu_has_a_process_and_the_slowest_rank_counts() -> None:
    asked: list[Any] = []

    def run(function: Any, ranks: int, device: str, **options: Any) -> list[dict[str, float]]:
        asked.append((ranks, device, options["backend"]))
        return [{"ring_gb_per_s": 40.0 - rank} for rank in range(ranks)]

    for num_gpus in (0, 1, 4):
        check = check_exchange(num_gpus, LIMIT_S, run)
    assert asked == [(2, "cpu", "gloo"), (2, "cpu", "gloo"), (4, "cuda", "nccl")]
    assert check == Check(
        "exchange",
        "ok",
        "4 processes, nccl: numbers are right; GB/s: ring 37",
        figures={"ring_gb_per_s": 37.0},
    )


def test_patterns_differ_by_position_source_and_target() -> None:
    pattern = partial(module._pattern, 500, device=torch.device("cpu"))
    first = pattern(1, 2)
    for other in (pattern(2, 2), pattern(1, 3), pattern(2, 1), first.roll(1)):
        assert bool((first != other).any())
