"""How many GPUs share each row of a step: which numbers may, and which is taken."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from longctx_patch.planner.advice import fastest
from longctx_patch.planner.degrees import TIE
from longctx_patch.planner.search import Result, left_out, possible_degrees, search
from longctx_patch.planner.step_time import StepTime
from tests.planner.jobs import llama_job, result_of

IDLE = StepTime(**dict.fromkeys((part.name for part in fields(StepTime)), 0.0))

MEASURED = {1: 28384, 2: 25423, 4: 24117}
"""Tokens per second and GPU of 8 layers and rows of 32,768 tokens, where so many H200 share a row
(docs/results/performance.md, docs/how-to/choose-degrees.md)."""


def ways(gpus: str, tokens: int, rows: int, layers: int = 8, **job: bool) -> dict[int, Result]:
    """The best candidate of each number of GPUs that may share a row, under `auto`."""
    found: dict[int, Result] = {}
    named = llama_job(gpus, tokens, num_layers=layers, rows_per_step=rows, **job)
    for result in search(named):
        if result.candidate.checkpoint == "auto" and not result.candidate.offload_states:
            found.setdefault(result.candidate.sequence_degree, result)
    return found


@pytest.mark.parametrize("rows", [4, 8, 32])
def test_gpus_take_rows_of_their_own_as_was_measured_to_be_faster(rows: int) -> None:
    found = ways("4xH200", 32768, rows)
    assert set(found) == set(MEASURED)
    assert fastest(list(found.values())) is found[1]
    assert found[1].forwards == rows // 4
    speeds = [found[degree].tokens_per_second_per_gpu for degree in MEASURED]
    assert all(speed > later for speed, later in pairwise(speeds))
    assert speeds[0] == pytest.approx(MEASURED[1], rel=0.02)


def test_few_rows_are_shared() -> None:
    """Fewer rows than GPUs leave no other choice, as one row over all did before."""
    for rows, degree in ((1, 4), (2, 2), (3, 4), (6, 2)):
        found = ways("4xH200", 32768, rows)
        assert fastest(list(found.values())).candidate.sequence_degree == degree
    assert set(ways("4xH200", 32768, 2)) == {2, 4}
    job = llama_job("4xH200", 32768, rows_per_step=2)
    assert left_out(job) == {1: "4 rows at once don't divide 2 rows a step"}


def test_long_rows_are_shared_since_one_gpu_has_no_room() -> None:
    found = ways("4xH200", 2**21, 4, layers=32)
    taken = fastest(list(found.values()))
    assert taken.fits
    assert taken.candidate.sequence_degree > 1
    assert not found[1].fits


def test_nothing_that_fits_leaves_the_nearest() -> None:
    found = ways("2xA100-40", 2**21, 2, layers=32)
    assert not any(result.fits for result in found.values())
    nearest = fastest(list(found.values()))
    assert nearest.shortfall == min(result.shortfall for result in found.values()) > 1


def test_of_equally_fast_ways_the_one_with_least_on_the_host_is_taken() -> None:
    found = ways("8xH200", 2**20, 8, layers=32)
    taken = fastest(list(found.values()))
    best = max(r.tokens_per_second_per_gpu for r in found.values() if r.fits)
    tied = [r for r in found.values() if r.tokens_per_second_per_gpu * (1 + TIE) >= best]
    assert len(tied) > 2
    assert taken.host_bytes == min(r.host_bytes for r in tied)


def test_of_equals_the_one_with_fewest_gpus_per_row_is_taken() -> None:
    job = llama_job("8xH200", 2**20, num_layers=4, lora=True, rows_per_step=8)
    equals = [result_of(job, ulysses=u, ring=1, checkpoint="attention") for u in (8, 4, 2)]
    assert {result.host_bytes for result in equals} == {0}
    taken = fastest(equals)
    assert taken is equals[2]


def test_a_way_within_the_tie_of_the_chosen_one_only_is_not_taken() -> None:
    """The chosen way is a little slower than the fastest, and the third a little more than that."""
    ways_of = ways("4xH200", 32768, 8)
    steps = {4: 1.0, 2: 1 + 0.9 * TIE, 1: 1 + 1.8 * TIE}
    timed = {
        degree: replace(ways_of[degree], time=replace(IDLE, attention=seconds))
        for degree, seconds in steps.items()
    }
    taken = fastest(list(timed.values()))
    assert taken is timed[2]


def test_groups_do_not_lie_across_nodes() -> None:
    job = llama_job("24xH200", 32768)
    assert possible_degrees(job) == [1, 2, 4, 8, 24]
    assert left_out(job)[12] == "groups of 12 GPUs would lie across nodes of 8"
    assert possible_degrees(llama_job("6xH200", 32768)) == [1, 2, 3, 6]
    assert possible_degrees(llama_job("16xH100", 3)) == [1, 2]
    with pytest.raises(ValueError, match="no number of GPUs may share a row"):
        possible_degrees(llama_job("16xH100", 3, rows_per_step=1))
