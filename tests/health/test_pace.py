"""A rank for which all others wait is named, by rates and a clock that are given: nothing is timed
here."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch

from longctx_patch.health import pace as module
from longctx_patch.health.pace import EVERY, PaceCheck
from tests.harness import run_distributed

CPU = torch.device("cpu")
TERA = 10**12
Rates = Callable[[int], float]
"""TFLOP/s of a rank after so many steps."""


def _flops(rates: Rates, step: int) -> float:
    return rates(step) * TERA


def steps_of(rates: Rates, num_steps: int = 70) -> tuple[dict[int, str], list[str]]:
    """What a check returns by step, where it is anything, and what it says."""
    said: list[str] = []
    step = 0
    check = PaceCheck(CPU, said.append, lambda: partial(_flops, rates, step))
    found = {}
    for step in range(1, num_steps + 1):  # which the probe reads
        if text := check.after_step(step):
            found[step] = text
        assert check.after_step(step) == ""  # a trainer's end of an epoch comes for a step again
    return found, said


def paces(rank: int) -> dict[str, tuple[dict[int, str], list[str]]]:
    def only(at: Rates, usual: float = 700.0) -> Rates:
        return (lambda step: usual) if rank != 1 else at

    jitter = itertools.cycle([665.0, 735.0, 700.0] if rank else [735.0, 700.0, 665.0])
    return {
        "equal": steps_of(lambda step: 700.0),
        "jitter": steps_of(lambda step: next(jitter)),
        "from the start": steps_of(only(lambda step: 137.0)),
        "from step 30 on": steps_of(only(lambda step: 560.0 if step >= 30 else 700.0), 100),
        "once": steps_of(only(lambda step: 100.0 if step == EVERY else 700.0)),
        "not measured": steps_of(only(lambda step: float("nan"))),
    }


def loads(rank: int) -> tuple[dict[int, str], list[str]]:
    """Batches of rank 1 take 30 ms of a step's 100 ms to come, those of others 1 ms."""
    now = 0.0
    said: list[str] = []

    def batches() -> Iterator[int]:
        nonlocal now
        for step in range(1, 60):
            now += 0.03 if rank == 1 else 0.001
            yield step

    with patch.object(module.time, "perf_counter", lambda: now):
        check, found = PaceCheck(CPU, said.append, lambda: lambda: 700.0 * TERA), {}
        for step in check.loading(batches()):
            now += 0.07 if rank == 1 else 0.099
            if text := check.after_step(step):
                found[step] = text
    return found, said


def three_ranks(rank: int) -> tuple[dict[str, tuple[dict[int, str], list[str]]], object]:
    return paces(rank), loads(rank)


def test_the_rank_that_all_wait_for_is_named_within_fifty_steps() -> None:
    every = run_distributed(three_ranks, 3)
    assert every[0] == every[1] == every[2]  # all ranks know it, and one prints it
    found, (loaded, said_of_loading) = every[0]
    assert found["equal"] == found["jitter"] == found["not measured"] == ({}, [])
    steps, said = found["from the start"]
    assert list(steps) == [1, EVERY + 2, 2 * EVERY + 2]  # in the first step's metrics, too
    assert len(said) == 1
    assert "SLOW GPU: all ranks wait in every step for rank 1 on " in said[0]
    assert "run at 137 TFLOP/s, 20% of 700, the others' median" in said[0]
    assert "The run goes on. `longctx doctor`" in said[0]
    assert set(steps.values()) == {said[0].split("\n")[0]}
    steps, said = found["from step 30 on"]
    assert 30 < min(steps) <= 30 + 50
    assert said[0].startswith("slow GPU: all ranks wait in every step for rank 1 on ")
    assert "80% of 700" in said[0]
    assert found["once"] == ({}, [])
    assert min(loaded) <= 50
    assert "rank 1" in said_of_loading[0]
    assert "loads batches for 30% of its time; the others' median is 1%" in said_of_loading[0]


def test_cpus_and_a_single_rank_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "of_all_ranks", None)  # calling it would raise
    monkeypatch.setattr(module, "gathered", None)
    alone = PaceCheck(CPU, print, lambda: lambda: 1.0)
    monkeypatch.setattr(module, "num_ranks", lambda: 2)
    on_cpu = PaceCheck(CPU, print)
    for check in (alone, on_cpu):
        assert list(check.loading([3, 4])) == [3, 4]
        assert [check.after_step(step) for step in range(1, 60)] == [""] * 59
