"""How fast a GPU computes, by its own clock, and which of several is slower than the others."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite, nan
from typing import Any

import torch

SLOW, VERY_SLOW = 0.9, 0.7
"""Shares of the usual rate at which a device is a warning, and a failure."""
TERA = 10**12


@dataclass(frozen=True)
class Timing:
    """The same work several times, timed on the device; nothing waits until `rate` is asked."""

    amount: float
    """FLOPs or bytes between two of the events."""
    events: Sequence[torch.cuda.Event]

    def rate(self) -> float:
        """The median, per second. Waits for the last event."""
        self.events[-1].synchronize()
        milliseconds = statistics.median(a.elapsed_time(b) for a, b in pairwise(self.events))
        return self.amount / (milliseconds / 1e3)


def time_work(
    work: Callable[[], object], amount: float, *, warm: int, together: int, repeats: int
) -> Timing:
    """Queue `work` on the current device: `warm` times, then `repeats` times `together` of it."""
    for _ in range(warm):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(together):
            work()
        event.record()
    return Timing(together * amount, events)


def time_products(
    device: torch.device, size: int, *, warm: int, together: int = 8, repeats: int = 1
) -> Timing:
    """Queue products of two `[size, size]` bfloat16 matrices of random numbers, of which torch's
    own generators know nothing. Raises OutOfMemoryError where `6 * size**2` bytes are not free."""
    generator = torch.Generator(device)
    generator.manual_seed(0)
    with torch.cuda.device(device), torch.no_grad():
        left, right = (
            torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_(
                generator=generator
            )
            for _ in range(2)
        )
        work = partial(torch.mm, left, right, out=torch.empty_like(left))
        return time_work(work, 2 * size**3, warm=warm, together=together, repeats=repeats)


def pci_of(properties: Any) -> str:
    """The place on the bus of a GPU, of its properties in torch; empty where torch is too old to
    know it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
    return f"{place}:{properties.pci_device_id:02x}.0"


@dataclass(frozen=True)
class Slow:
    """One that is at least 10 % slower than it should be."""

    index: int
    rate: float
    usual: float
    by: str
    """Whose rate the usual one is, in words."""

    @property
    def share(self) -> float:
        return self.rate / self.usual

    @property
    def is_failure(self) -> bool:
        return self.share <= VERY_SLOW


def slow_ones(rates: Sequence[float], known: float = nan, kind: str = "") -> list[Slow]:
    """Those at least 10 % under the median of the others, or under what their kind is known to do,
    whichever is more.

    Args:
        rates: of devices that are alike. What is not finite was not measured.
        known: the rate of this kind of device; NaN where none is known.
        kind: its name.
    """
    found = []
    for index, rate in enumerate(rates):
        others = [r for at, r in enumerate(rates) if at != index and isfinite(r)]
        usual = [(known, f"what {kind} is known to do")] if isfinite(known) else []
        usual += [(statistics.median(others), "the others' median")] if others else []
        slow = Slow(index, rate, *max(usual, default=(nan, "")))
        if slow.share <= SLOW:
            found.append(slow)
    return found
