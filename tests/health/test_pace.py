"""A rank for which all others wait is named, by rates and a clock that are given: nothing is timed
here."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from longctx_patch.health import pace as module
from longctx_patch.health.pace import EVERY, PROBE_EVERY, PaceCheck, Timing, pci_of, slow_ones
from tests.harness import run_distributed

CPU = torch.device("cpu")
TERA = 10**12
Rates = Callable[[int], float]
"""TFLOP/s of a rank after so many steps."""
BESIDE_OTHERS = [702, 698, 169, 685, 172, 708, 170, 692, 171, 170, 688, 172, 698, 700, 169, 680]
"""Probes of an H200 on which two other processes compute, a step's products between them."""


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
        "beside others from step 30 on": steps_of(
            only(lambda step: BESIDE_OTHERS[step // PROBE_EVERY % 16] if step >= 30 else 700.0), 100
        ),
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
    assert "83% of 700" in said[0]  # the last of its five probes is from before
    steps, said = found["beside others from step 30 on"]
    assert 30 < min(steps) <= 30 + 50
    assert said[0].startswith("SLOW GPU: all ranks wait in every step for rank 1 on ")
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


def test_the_slow_one_is_found_and_equal_ones_are_not() -> None:
    (slow,) = slow_ones([690.0, 700.0, 137.0, 695.0])
    assert (slow.index, slow.rate, slow.usual, slow.by) == (2, 137, 695, "the others' median")
    assert slow.is_failure
    assert round(slow.share, 3) == 0.197
    assert slow_ones([700.0] * 4) == []
    assert slow_ones([95.0, 105.0, 105.0, 105.0]) == []  # 5 % to either side
    (slow,) = slow_ones([100.0, 85.0])  # of two, too
    assert (slow.index, slow.is_failure) == (1, False)
    assert [slow.index for slow in slow_ones([100.0, 50.0, 100.0, 100.0, 60.0])] == [1, 4]
    assert slow_ones([100.0]) == slow_ones([]) == []


def test_what_a_kind_is_known_to_do_finds_a_host_that_is_slow_as_a_whole() -> None:
    found = slow_ones([400.0, 410.0], 685.0, "an H100")
    assert [slow.by for slow in found] == ["what an H100 is known to do"] * 2
    assert all(slow.is_failure for slow in found)
    assert slow_ones([800.0, 790.0], 685.0) == []


def test_what_was_not_measured_is_not_judged() -> None:
    (slow,) = slow_ones([nan, 100.0, 60.0])
    assert (slow.index, slow.usual) == (2, 100)
    assert slow_ones([nan, nan], 685.0) == slow_ones([nan, inf]) == []


def test_a_rate_is_that_of_the_median_of_repeats() -> None:
    waited = []

    def event(at: float) -> Any:
        return SimpleNamespace(
            at=at, elapsed_time=lambda to: to.at - at, synchronize=lambda: waited.append(at)
        )

    timing = Timing(6e9, [event(at) for at in (0.0, 2.0, 50.0, 53.0)])  # 2, 48 and 3 ms
    assert timing.rate() == pytest.approx(2e12)
    assert waited == [53.0]


def test_the_place_on_the_bus_is_that_of_nvidia_smi() -> None:
    assert pci_of(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)) == (
        "0000:3b:00.0"
    )
    assert pci_of(SimpleNamespace()) == ""
