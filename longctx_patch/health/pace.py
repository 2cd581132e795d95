"""Measures how fast GPUs compute, and names a rank that is slower than the others, for which all
wait in each step.

The waits look alike on all ranks: those of fast ones lie in their exchanges. So each GPU is timed
apart from them, by the same few matrix products: at the start, and after every `PROBE_EVERY` steps.
Its own clock times them and nobody waits for it: a rank reads its rate a step later. Every `EVERY`
steps the ranks compare theirs. Each rank's time for loading batches, which has no exchanges either,
is compared likewise. Processes on the CPU share its cores with other work and are not measured.
"""

import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite, nan
from typing import Any, TypeVar

import torch

from longctx_patch.health.finite import OnTheWay, gathered
from longctx_patch.rules.together import num_ranks, of_all_ranks, own_rank

SLOW, VERY_SLOW = 0.9, 0.7
"""Shares of the usual rate at which a device is a warning, and a failure."""
TERA = 10**12
EVERY, PROBE_EVERY = 24, 4
"""A rank's rate is the mean of its last six probes but the slowest: a GPU that gets slow is named
within twice `EVERY` steps and two more, and one that was disturbed once is not. The mean, since
another process on a GPU stops some probes (H200, two processes: 170 TFLOP/s in 24 of 40) and not
the rest (700). A probe takes 2 ms of the GPU."""
LOADING_SHARE = 0.1
"""A rank is named that loads for so much more of its time than the others' median."""
_SIZE = 4096
"""Products of this size take 0.2 ms each on an H100, and 100 MB."""
_AT_START = 40
"""Clocks of a GPU rise when it begins to compute: the first half of so many probes is left out."""

Probe = Callable[[], Callable[[], float]]
"""Begins to measure, and returns what waits for the rate, in FLOP/s."""
Batch = TypeVar("Batch")


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
    """Finds the ranks at least 10 % under the median of the others, or under what their kind is
    known to do, whichever is more.

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


def probe_of(device: torch.device) -> Probe | None:
    """Nine products on a GPU; None on the CPU."""
    return partial(_queued_products, device) if device.type == "cuda" else None


def _queued_products(device: torch.device) -> Callable[[], float]:
    try:
        return time_products(device, _SIZE, warm=1).rate
    except torch.OutOfMemoryError:
        return lambda: nan


class PaceCheck:
    """Names slow ranks at the start of a run, and within 50 steps. Collective over the world.

    Args:
        device: that this process computes on.
        say: prints a line, on one rank.
        probe: measures this rank in place of its GPU.

    Example:
        >>> pace = PaceCheck(accelerator.device, accelerator.print)  # doctest: +SKIP
        >>> for step, batch in enumerate(pace.loading(loader), start=1):  # doctest: +SKIP
        ...     train_step(batch)
        ...     pace.after_step(step)
    """

    def __init__(
        self, device: torch.device, say: Callable[[str], None], probe: Probe | None = None
    ) -> None:
        found = probe or probe_of(device)
        self._probe = found if num_ranks() > 1 else None
        self._device, self._say = device, say
        self._steps, self._last_step = 0, -1
        self._since, self._loading_s = 0.0, 0.0
        self._reading: Callable[[], float] | None = None
        self._sent: OnTheWay | None = None
        self._said = set[tuple[int, str]]()
        self._rates: deque[float] = deque(maxlen=EVERY // PROBE_EVERY)
        self._at_start = ""
        if self._probe is not None:
            rates = [read() for read in [self._probe() for _ in range(_AT_START)]]
            mean = _mean(rates[_AT_START // 2 :])
            self._rates += EVERY // PROBE_EVERY * [mean]
            everyone = of_all_ranks((_who(device), mean))
            self._who = [who for who, _ in everyone]
            self._at_start = self._judged([rate for _, rate in everyone], [0.0] * num_ranks())

    def loading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, while the time that each takes to come is counted."""
        found = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(found)
            except StopIteration:
                return
            finally:
                self._loading_s += time.perf_counter() - started
            yield batch

    def after_step(self, step: int) -> str:
        """Call it after each optimizer step, on every rank; it waits for nothing.

        Returns:
            Which ranks are slow, in words, in the steps in which that is known anew, for the
            metrics; else an empty text. The same on all ranks. What was not said yet is said.
        """
        if self._probe is None or step == self._last_step:
            return ""
        self._steps, self._last_step = self._steps + 1, step
        found, self._at_start = self._at_start, ""
        if self._steps == 1:
            self._since, self._loading_s = time.perf_counter(), 0.0
        if self._sent is not None:
            rates, shares = self._sent.numbers().T.tolist()
            self._sent, found = None, self._judged(rates, shares)
        if self._reading is not None:
            self._rates.append(self._reading())
            self._reading = None
            if self._steps % EVERY == 1:
                self._send()
        if self._steps % PROBE_EVERY == 0:
            self._reading = self._probe()
        return found

    def _send(self) -> None:
        now = time.perf_counter()
        share = self._loading_s / max(now - self._since, 1e-9)
        self._since, self._loading_s = now, 0.0
        slowest_left_out = sorted(rate for rate in self._rates if isfinite(rate))[1:]
        mine = torch.tensor([_mean(slowest_left_out), share], dtype=torch.float64)
        self._sent = OnTheWay(gathered(mine.to(self._device, non_blocking=True)))

    def _judged(self, rates: Sequence[float], shares: Sequence[float]) -> str:
        """Says what is wrong with which ranks, in words. Says it if it was not said before."""
        found = dict[tuple[int, str], str]()
        for slow in slow_ones(rates):
            loud = "SLOW GPU" if slow.is_failure else "slow GPU"
            found[slow.index, loud] = (
                f"{loud}: all ranks wait in every step for rank {self._who[slow.index]}. Its "
                f"matrix products run at {slow.rate / TERA:.0f} TFLOP/s, {slow.share:.0%} of "
                f"{slow.usual / TERA:.0f}, {slow.by}"
            )
        for rank, share in enumerate(shares):
            usual = statistics.median([*shares[:rank], *shares[rank + 1 :]])
            if share - usual >= LOADING_SHARE:
                found[rank, "loads"] = (
                    f"slow data: all ranks wait for rank {self._who[rank]}. It loads batches for "
                    f"{share:.0%} of its time; the others' median is {usual:.0%}"
                )
        if found.keys() - self._said:
            self._said |= found.keys()
            self._say("\n".join([*found.values(), _ADVICE]))
        return "; ".join(found.values())


_ADVICE = (
    "The run goes on. `longctx doctor` on that machine measures its GPUs and links and says how to "
    "find out why. A checkpoint goes on without that GPU, or on another machine."
)


def _mean(rates: Iterable[float]) -> float:
    """The work of all over the time of all, of those that were measured."""
    return statistics.harmonic_mean([rate for rate in rates if isfinite(rate)] or [nan])


def _who(device: torch.device) -> str:
    """This rank and its place in words."""
    where = f"{own_rank()} on {platform.node()}"
    if device.type != "cuda":
        return where
    number = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(number)
    return f"{where}, GPU {number} ({properties.name}, {pci_of(properties)})"
