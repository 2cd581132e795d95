"""Processes that fail or hang end, and their tracebacks are shown."""

import time

import pytest
import torch
import torch.distributed as dist

from longctx_patch.transport.processes import ProcessesFailedError, run_processes


def total(rank: int, factor: int) -> int:
    number = torch.tensor(rank * factor)
    dist.all_reduce(number)
    print("must not reach the parent's stdout")
    return int(number)


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("this rank is out of luck")
    dist.barrier()


def hang_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def test_results_by_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_processes(total, 2, 10, timeout_s=200) == [10, 10]
    assert capfd.readouterr().out == ""


def test_a_failing_rank_is_shown_and_does_not_leave_the_others_waiting() -> None:
    with pytest.raises(ProcessesFailedError, match=r"rank 1:\n(.*\n)*.*out of luck") as caught:
        run_processes(fail_on_one, 2, timeout_s=200)
    assert "time limit" not in str(caught.value)
    assert not caught.value.timed_out


def test_a_hang_ends_at_the_limit_with_its_stack() -> None:
    """On a busy machine the shorter limits may pass before the ranks have started."""
    run_processes(total, 2, 10, timeout_s=200)  # loads what later processes fork from
    for limit_s in (4, 16, 64):
        with pytest.raises(ProcessesFailedError, match=f"limit of {limit_s} s passed") as caught:
            run_processes(hang_on_one, 2, timeout_s=limit_s)
        assert caught.value.timed_out
        if "in hang_on_one" in str(caught.value):
            return
    raise AssertionError(str(caught.value))
