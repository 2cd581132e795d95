"""Ranks that meet get each other's numbers, and raise errors together."""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from longctx_patch.transport import (
    ProcessGroupTransport,
    SoloTransport,
    Transport,
    VirtualTransport,
    run_virtual_ranks,
)
from longctx_patch.transport.meeting import (
    Meeting,
    SequenceParallelismError,
    digest,
    meet,
    table,
)
from tests.harness import run_distributed

WRONG = ValueError("x=7: too many for naïve ranks. Use x=1.")
MISFIRE = SequenceParallelismError("a layer ran twice")


def said(run: Callable[[Transport], object], transport: Transport) -> tuple[str, str]:
    """The type and the message of the error that this rank raises."""
    with pytest.raises((ValueError, SequenceParallelismError)) as caught:
        run(transport)
    return type(caught.value).__name__, str(caught.value)


def on_three(run: Callable[[Transport], object]) -> list[tuple[str, str]]:
    return run_virtual_ranks(3, lambda transport: said(run, transport))


def test_everyone_gets_everyones_numbers() -> None:
    def run(transport: VirtualTransport) -> list[tuple[int, ...]]:
        rows = meet(transport, Meeting.LAYER, (transport.group_rank, -(2**62)))
        assert transport.counters.messages == 0
        return rows

    assert run_virtual_ranks(3, run) == [[(rank, -(2**62)) for rank in range(3)]] * 3
    assert meet(SoloTransport(), Meeting.LAYER, (4,)) == [(4,)]


def test_ranks_at_different_meetings_find_it_out() -> None:
    """They do even if one of them refuses its input and brings more numbers than the others."""

    def run(transport: Transport) -> None:
        if transport.group_rank == 1:
            meet(transport, Meeting.BATCH, (1, 2, 3), WRONG)
        meet(transport, Meeting.LABELS)

    for name, words in on_three(run):
        assert name == "SequenceParallelismError"
        assert "(rank 0: LABELS, rank 1: BATCH, rank 2: LABELS)" in words


def test_a_rank_that_refuses_its_input_stops_all_with_its_reason() -> None:
    def run(transport: Transport) -> None:
        meet(transport, Meeting.LABELS, (1,), WRONG if transport.group_rank == 1 else None)

    mine = ("ValueError", str(WRONG))
    others = ("ValueError", f"rank 1 of the group refused: {WRONG}")
    assert on_three(run) == [others, mine, others]


def test_the_gravest_problem_is_raised_everywhere() -> None:
    def run(transport: Transport) -> None:
        meet(transport, Meeting.BATCH, problem=(WRONG, None, MISFIRE)[transport.group_rank])

    found = on_three(run)
    assert {name for name, _ in found} == {"SequenceParallelismError"}
    assert found[2][1] == str(MISFIRE)
    for _, words in found[:2]:
        assert "planned: rank 2 of the group refused: a layer ran twice. Something repl" in words


def test_a_table_has_a_line_for_each_rank() -> None:
    def run(transport: VirtualTransport) -> str:
        return table(transport, "ñ" * transport.group_rank)

    assert run_virtual_ranks(3, run) == ["  rank 0: \n  rank 1: ñ\n  rank 2: ññ"] * 3


def test_digests_tell_texts_apart_and_fit_a_number() -> None:
    found = {digest(f"mask {number:08x}") for number in range(1000)}
    assert len(found) == 1000
    assert 0 <= min(found) <= max(found) < 2**63


def check_process_group(rank: int) -> None:
    assert dist.group.WORLD is not None
    everyone = ProcessGroupTransport(dist.group.WORLD, torch.device("cpu"))
    assert meet(everyone, Meeting.CONFIG, (rank, 2**62)) == [(0, 2**62), (1, 2**62)]
    name, words = said(
        lambda it: meet(it, Meeting.CONFIG, problem=WRONG if rank else None), everyone
    )
    assert name == "ValueError"
    assert words.endswith(str(WRONG))


def wait_in_vain(rank: int) -> list[str]:
    """torch's own error speaks of a socket; a rank may have called the model alone."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    everyone = ProcessGroupTransport(group, torch.device("cpu"))
    notes = []
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out") as caught:
            meet(everyone, Meeting.BATCH)
        notes = caught.value.__notes__
    dist.barrier()
    return notes


def meet_and_wait(rank: int) -> list[str]:
    check_process_group(rank)
    return wait_in_vain(rank)


def test_processes_meet_and_one_that_waits_in_vain_is_told_what_for() -> None:
    (note,), nothing = run_distributed(meet_and_wait, 2)
    assert re.search(r"share a row meet \(BATCH\).* call model.eval\(\) before it", note)
    assert nothing == []
