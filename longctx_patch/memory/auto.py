"""Policy `auto`: recompute only as many layers as the memory at hand demands.

Every layer begins on the cheapest policy of `LADDER`; as many as fit climb to the dearest.

**Which layers.** The last ones. Backward frees them first, so of all choices of k layers the last k
are those of which the fewest are alive at each moment of forward and of backward; and a layer that
is recomputed holds its activations for a moment when theirs are gone already.

**How many.** A layer that climbs adds `extra` bytes, for no longer than its activations live. So if
passes peaked at `peak` bytes, k more layers peak at `peak + k * extra` at most, wherever the peak
was: in the loss, in the first layers of backward, or where gradients pile up at its end. What rests
now and did not while the peak was measured (the optimizer's states after its first step) comes on
top, so no step of the optimizer has to be seen:

    peak + (resting now - resting then) + sum of extras <= (1 - MARGIN) * capacity

**Measuring.** In the first training pass, and in the first of each new greatest number of tokens,
one layer of each kind climbs, the last, and all layers are metered. From the pass after, layers
climb; each later pass compares again what was measured with what there is. The bound is loose where
the peak is not in the layers; then a pass with more layers shows it, and more climb.

The peak is that of forward and backward. The optimizer's own is the same whatever is recomputed,
since activations are freed by then.

Shorter passes run as the longest one does: they need less, and they matter less.
"""

import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low
from typing import Any

import torch

from longctx_patch.memory.meter import Meter
from longctx_patch.memory.policies import LayerPolicy, run_layer

LADDER: tuple[LayerPolicy, ...] = ("none", "attention")
"""Policies of a layer, from the dearest in memory and cheapest in time to the other end."""

MARGIN = 0.06
"""Share of the capacity that is left free: for what the allocator can't use because it is in
pieces, for passes that need more than those measured (other documents, experts with more tokens),
and for libraries that allocate for themselves. Layers step down when half of it is used."""

MEASURE = -1
"""In place of a number of layers: this pass measures. Less than any number, so the least of what
ranks propose is right for all."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What was measured, and the memory it is held against."""

    num_tokens: int
    """Of the longest training pass: rows times tokens of the whole sequence."""
    peak_bytes: int
    """Of forward and backward under the policies of now; a bound until such a pass is over."""
    extra_bytes: tuple[int, ...]
    """What each layer keeps beyond the cheapest policy if it is not recomputed."""
    capacity_bytes: int


@dataclass(eq=False)
class Pass:
    """A training pass whose backward is not over."""

    number: int
    num_tokens: int
    window: "_Window"
    rest_bytes: int
    peak_before_bytes: int


@dataclass(eq=False)
class _Window:
    """The passes since the number of layers changed."""

    peak_bytes: int
    """Expected, until it was observed."""
    rest_bytes: int
    """What was allocated as the passes began that showed it; the most."""
    is_observed: bool = False
    """Whether the backward of a longest pass was seen."""
    at_once: int = 1
    """Passes whose activations are alive at the same time; extras count for each."""


class AutoPolicy:
    """Decides over the layers of one model, on one rank; between passes, never within one.

    For each training pass: `propose`, take the least over the ranks of the group, `begin` with it,
    `run` each layer, and `end` when its backward is over.
    """

    def __init__(self, meter: Meter, kinds: Sequence[Hashable]) -> None:
        """`kinds`: equal for layers that keep equally much."""
        self.policies: tuple[LayerPolicy, ...] = (LADDER[-1],) * len(kinds)
        self._meter = meter
        self._kinds = tuple(kinds)
        self._kept: dict[int, int] = {}
        self._is_measuring = False
        self._extra: tuple[int, ...] = ()
        self._num_tokens = 0
        self._whole = 0
        self._window = _Window(0, 0)
        self._num_passes = 0
        # Weak: a loss that is thrown away takes its pass along.
        self._open: weakref.WeakSet[Pass] = weakref.WeakSet()

    @property
    def use(self) -> MemoryUse | None:
        """None until a pass has measured the layers."""
        if not self._extra:
            return None
        return MemoryUse(
            num_tokens=self._num_tokens,
            peak_bytes=self._window.peak_bytes,
            extra_bytes=self._extra,
            capacity_bytes=self._meter.capacity(),
        )

    def propose(self, num_tokens: int) -> int:
        """How many of the last layers this rank can leave whole in the pass that begins, or
        `MEASURE`. `num_tokens` is the same on every rank of the group."""
        if num_tokens > self._num_tokens or not self._extra:
            return MEASURE
        if self._open:
            return self._whole  # a forward before the backward of another: both under one decision
        used, capacity = self._expected_bytes(self._meter.allocated()), self._meter.capacity()
        room = (1 - MARGIN) * capacity - used + self._whole_bytes(self.policies)
        at_once = [self._window.at_once * extra for extra in self._extra]
        fitting = most_whole_layers(at_once, room)
        may_stay = used <= (1 - MARGIN / 2) * capacity
        if fitting > self._whole:
            return fitting if self._window.is_observed else self._whole
        return self._whole if may_stay else fitting

    def begin(self, num_tokens: int, whole: int) -> Pass:
        """The pass begins, with what the ranks agreed on."""
        rest = self._meter.allocated()
        before = self.policies
        if whole == MEASURE:
            self._kept, self._extra, self._is_measuring = {}, (), True
            self._num_tokens, self._whole = num_tokens, 0
            last = {kind: layer for layer, kind in enumerate(self._kinds)}
            self.policies = self._climbing(set(last.values()))
            self._start_window(rest, rest)
        else:
            num_layers = len(self._kinds)
            self.policies = self._climbing(range(num_layers - whole, num_layers))
            if whole != self._whole:
                change = self._whole_bytes(self.policies) - self._whole_bytes(before)
                self._start_window(self._expected_bytes(rest) + change, rest)
                self._whole = whole
        self._num_passes += 1
        this = Pass(self._num_passes, num_tokens, self._window, rest, self._meter.peak())
        self._open.add(this)
        self._window.at_once = max(self._window.at_once, len(self._open))
        return this

    def run(self, layer: int, forward: Callable[..., Any], *args: Any) -> Any:
        """A layer's forward, under its policy of now."""
        if not (self._is_measuring and torch.is_grad_enabled()):
            return run_layer(self.policies[layer], forward, *args)
        before = self._meter.allocated()
        out = run_layer(self.policies[layer], forward, *args)
        self._kept[layer] = self._meter.allocated() - before
        if len(self._kept) == len(self._kinds):
            self._extra = extra_bytes(self._kinds, self._kept, self.policies)
            self._is_measuring = False
        return out

    def end(self, this: Pass) -> None:
        """The backward of a pass is over; again for another backward through the same graph."""
        # One that began earlier and is still alive is an output that somebody just keeps.
        self._open = weakref.WeakSet(p for p in self._open if p.number > this.number)
        window, peak = this.window, self._meter.peak()
        if window is not self._window:
            return
        is_longest = this.num_tokens == self._num_tokens
        if is_longest and not window.is_observed:
            window.peak_bytes, window.rest_bytes, window.is_observed = peak, this.rest_bytes, True
        # An earlier peak that is not a pass's, the optimizer's say, would hide this one.
        elif peak > this.peak_before_bytes or peak <= window.peak_bytes:
            window.peak_bytes = max(window.peak_bytes, peak)
            if is_longest:
                window.rest_bytes = max(window.rest_bytes, this.rest_bytes)

    def _start_window(self, expected_bytes: int, rest_bytes: int) -> None:
        self._meter.reset_peak()
        self._window = _Window(expected_bytes, rest_bytes)

    def _expected_bytes(self, rest_bytes: int) -> int:
        """Peak of a pass under the policies of now that begins with so much allocated."""
        return self._window.peak_bytes + max(0, rest_bytes - self._window.rest_bytes)

    def _climbing(self, layers: Container[int]) -> tuple[LayerPolicy, ...]:
        return tuple(
            LADDER[0] if layer in layers else LADDER[-1] for layer in range(len(self._kinds))
        )

    def _whole_bytes(self, policies: Sequence[LayerPolicy]) -> int:
        """Extras that are alive at once."""
        pairs = zip(self._extra, policies, strict=True)
        whole = sum(extra for extra, policy in pairs if policy == LADDER[0])
        return self._window.at_once * whole


def most_whole_layers(extra_bytes: Sequence[int], room_bytes: float) -> int:
    """How many layers, counted from the last, fit into the room together."""
    return sum(total <= room_bytes for total in accumulate(reversed(extra_bytes)))


def extra_bytes(
    kinds: Sequence[Hashable], kept_bytes: dict[int, int], policies: Sequence[LayerPolicy]
) -> tuple[int, ...]:
    """By layer: what its kind keeps on the dearest policy beyond the cheapest.

    From a pass in which one layer of each kind was on the dearest. The first layers differ a little
    (buffers of FSDP, inputs without gradient), hence the median of those on the cheapest; a kind
    with one layer only is taken at all it keeps.
    """
    extra: dict[Hashable, int] = {}
    for kind in set(kinds):
        mine = [layer for layer, other in enumerate(kinds) if other == kind]
        (dear,) = [kept_bytes[layer] for layer in mine if policies[layer] == LADDER[0]]
        cheap = [kept_bytes[layer] for layer in mine if policies[layer] != LADDER[0]]
        extra[kind] = max(0, dear - (median_low(cheap) if cheap else 0))
    return tuple(extra[kind] for kind in kinds)
