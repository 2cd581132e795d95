"""Which of several devices is slow, by rates that are given: nothing is timed here."""

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from longctx_patch.health.rates import Timing, pci_of, slow_ones


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
