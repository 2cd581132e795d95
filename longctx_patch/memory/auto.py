"""Policy `auto`: recompute only as many layers as the memory at hand demands.

Every layer begins on the lowest rung of `LADDER`, which takes least memory. Layers climb one rung
at a time: first as many as fit from `offload` to `attention`, then as many as fit to `none`.

**Which layers climb.** The last ones. Backward frees their activations first, so among all choices
of k layers those of the last k overlap least with what else is alive: they are gone already when an
earlier layer is recomputed and holds its own. Offloading the last layers would save little too:
backward needs their tensors before these have left the device.

**How many climb.** A layer that climbs adds `extra` bytes, for no longer than its activations live.
If passes peaked at `peak` bytes, passes with more climbs peak at most at `peak` plus the sum of
their extras, wherever the peak was: in the loss, in the first layers of backward, or where
gradients pile up at its end. Memory that is held between passes ("resting") now but was not when
the peak was measured, such as the optimizer's states after its first step, comes on top, so no step
of the optimizer has to be observed:

    peak + (resting now - resting then) + sum of extras <= (1 - MARGIN) * capacity

**Measuring.** The first training pass measures, and so does the first pass of each new greatest
number of tokens. In this pass the last layer of each kind is on the highest rung, and all layers
are metered. The others keep attention until they have taken half of the margin, and are offloaded
from there on, so that measuring needs as little device memory as possible; it may take all the host
memory that may be taken. From the next pass on, layers climb, and each pass compares anew what was
measured with what is available. The bound is loose where the peak is not in the layers; a pass with
more climbs shows this, and more layers follow. A rehearsal measures too (`AutoPolicy.know`), so
that layers climb in the first pass already.

Where passes come near to the capacity, fragmentation may force the allocator to release its cached
memory in each pass. This costs more than a layer's recompute, so two such passes among the last
eight count as if all of the capacity was used.

The peak is that of forward and backward. The optimizer's own peak is the same whatever is
recomputed, since activations are freed by then. Shorter passes run under the policies of the
longest one.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch

from longctx_patch.memory.ladder import (
    HIGHEST,
    LOWEST,
    RECENT,
    Extra,
    MemoryUse,
    Pass,
    Rehearsed,
    Window,
    after_climbs,
    measured_extra,
    to_measure,
)
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.meter import Meter
from longctx_patch.memory.offload import HostCopies
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.memory.run_layer import run_layer

MEASURE = -1
"""Proposed in place of a number of climbs by a rank that has to measure. It is less than any such
number, so the least of all proposals makes every rank measure."""


class AutoPolicy:
    """Chooses the policies of one model's layers on one rank, between passes and never within one.

    For each training pass, call `propose`, take the least over the ranks of the group, `begin` the
    pass with it, `run` each layer, and `end` the pass when its backward is over.
    """

    def __init__(
        self,
        meter: Meter,
        kinds: Sequence[Hashable],
        host: HostCopies | None = None,
        share: float = 1.0,
    ) -> None:
        """`kinds` has one entry for each layer, equal for layers that keep equally much. Without
        `host` no layer is offloaded. Layers that keep attention keep it for a `share` of the
        tokens."""
        self._meter = meter
        self._kinds = tuple(kinds)
        self._host = host
        self._share = share
        self._fewest_climbs = 0 if host else len(kinds)
        self._climbs = self._fewest_climbs
        self._ceiling = 2 * len(kinds)
        self._is_under_way = False
        self._retries = self._failures = 0
        """The meter's number of retries at the end of the last pass (at its start, if it has not
        ended), and its number of failures at the start of the last pass."""
        self.policies = after_climbs(self._climbs, len(kinds))
        self._allocated: list[int] = []
        self._measuring_limit = 0.0
        self._is_measuring = False
        self._extra: tuple[Extra, ...] = ()
        self._num_tokens = 0
        self._window = Window(0, 0)
        self._num_passes = 0
        # Weak references: a loss that is dropped without backward takes its pass along.
        self._open: weakref.WeakSet[Pass] = weakref.WeakSet()

    @property
    def use(self) -> MemoryUse | None:
        """The measured use; None until a pass has measured the layers."""
        if not self._extra:
            return None
        return MemoryUse(
            num_tokens=self._num_tokens,
            peak_bytes=self._window.peak_bytes,
            extra_bytes=self._extra,
            capacity_bytes=self._meter.fillable(self._window.rest_bytes),
        )

    def know(self, num_tokens: int, found: "Rehearsed") -> None:
        """Take what a rehearsal found in place of a first pass that measures.

        It holds for a pass of `num_tokens` tokens whose backward comes before the next forward.
        """
        num_layers = len(self._kinds)
        self._num_tokens, self._extra = num_tokens, (found.extra_bytes,) * num_layers
        climbs = max(self._fewest_climbs, num_layers - found.host_layers)
        self.policies = (*after_climbs(climbs, num_layers)[:-1], HIGHEST)
        self._window = Window(found.peak_bytes, found.rest_bytes, is_rehearsed=True)

    def propose(self, num_tokens: int) -> int:
        """The number of climbs that this rank has memory for in the pass that begins, or `MEASURE`.

        `num_tokens` is the same on every rank of the group.
        """
        if num_tokens > self._num_tokens or not self._extra:
            return MEASURE
        if self._open:
            return self._climbs  # another pass awaits its backward: both run as decided
        rest = self._meter.allocated()
        capacity = self._meter.fillable(max(rest, self._window.rest_bytes))
        self._count_interrupted_pass(capacity)
        used = self._expected_bytes(rest)
        room = (1 - MARGIN) * capacity - used
        as_decided = self.policies == after_climbs(self._climbs, len(self._kinds))
        if room >= 0:
            is_known = self._window.is_observed or self._window.is_rehearsed
            most = self._most_climbs(lambda _, more: more <= room) if is_known else self._climbs
            return min(most, self._ceiling)
        if as_decided and used <= (1 - MARGIN / 2) * capacity:
            return self._climbs
        fewer = self._most_climbs(lambda less, more: not more and less >= -room)
        # What was too much once is not tried again: loads may change from pass to pass.
        if as_decided and self._window.is_short:
            self._ceiling = fewer
        elif as_decided and self._window.is_observed:
            self._ceiling = max(self._fewest_climbs, self._climbs - 1)
        return fewer

    def begin(self, num_tokens: int, climbs: int) -> Pass:
        """Begin a pass with the climbs that the ranks agreed on."""
        rest = self._meter.allocated()
        if climbs == MEASURE:
            self._allocated, self._extra, self._is_measuring = [], (), True
            self._num_tokens, self._climbs = num_tokens, self._fewest_climbs
            self._ceiling = 2 * len(self._kinds)
            self._measuring_limit = rest + MARGIN / 2 * self._meter.fillable(rest)
            self.policies = to_measure(self._kinds)
            self._start_window(rest, rest)
        else:
            before, self.policies = self.policies, after_climbs(climbs, len(self._kinds))
            self._climbs = climbs
            if self.policies != before:
                less, more = self._change_bytes(before, self.policies)
                expected = self._expected_bytes(rest) + (more or -less)
                self._start_window(expected, max(rest, self._window.rest_bytes))
        if num_tokens == self._num_tokens and not self._window.is_observed and not self._open:
            self._meter.reset_peak()  # so that the peak is this pass's, not an evaluation's
        self._num_passes += 1
        self._is_under_way = True
        self._failures = self._meter.failures()
        if not self._open:
            self._retries = self._meter.retries()
        this = Pass(self._num_passes, num_tokens, self._window, rest, self._meter.peak())
        self._open.add(this)
        self._window.at_once = max(self._window.at_once, len(self._open))
        return this

    def run(self, layer: int, forward: Callable[..., Any], *args: Any) -> Any:
        """Run a layer's forward under its present policy."""
        if not (self._is_measuring and torch.is_grad_enabled()):
            return self._run(layer, forward, *args)
        self._allocated.append(self._meter.allocated())
        if self._must_offload(layer):
            self.policies = (*self.policies[:layer], LOWEST, *self.policies[layer + 1 :])
        out = self._run(layer, forward, *args)
        if len(self._allocated) == len(self._kinds):
            self._allocated.append(self._meter.allocated())
            # Kept bytes are counted when the next layer begins: the input may be freed only then.
            kept = [after - before for before, after in pairwise(self._allocated)]
            self._extra = measured_extra(self._kinds, kept, self.policies)
            self._is_measuring = False
        return out

    def _run(self, layer: int, forward: Callable[..., Any], *args: Any) -> Any:
        policy = self.policies[layer]
        return run_layer(policy, forward, *args, host=self._host, share=self._share)

    def end(self, this: Pass) -> None:
        """Note that the backward of a pass is over; called again for a second backward."""
        self._is_under_way = False
        # A pass that began earlier and is still alive is an output kept without backward.
        self._open = weakref.WeakSet(p for p in self._open if p.number > this.number)
        window, peak = this.window, self._meter.peak()
        retries_before, self._retries = self._retries, self._meter.retries()
        if window is not self._window:
            return
        window.recent = (*window.recent, self._retries > retries_before)[-RECENT:]
        is_longest = this.num_tokens == self._num_tokens
        if is_longest and not window.is_observed:
            window.peak_bytes, window.rest_bytes, window.is_observed = peak, this.rest_bytes, True
        # An earlier peak outside of passes, such as the optimizer's, would hide this one.
        elif peak > this.peak_before_bytes or peak <= window.peak_bytes:
            if not is_longest and peak > window.peak_bytes:
                peak = max(peak, self._expected_bytes(this.rest_bytes))
            if is_longest or peak > window.peak_bytes:
                window.rest_bytes = max(window.rest_bytes, this.rest_bytes)
            window.peak_bytes = max(window.peak_bytes, peak)
        if window.is_short:
            full = self._meter.fillable(this.rest_bytes)
            window.peak_bytes = max(window.peak_bytes, full)

    def _count_interrupted_pass(self, capacity: int) -> None:
        """Count a pass that never ended: if it came near the capacity, it ran out of memory."""
        peak = self._meter.peak()
        if self._meter.failures() > self._failures:
            peak = max(peak, capacity)
        if self._is_under_way and peak > (1 - MARGIN / 2) * capacity:
            self._window.peak_bytes = max(self._window.peak_bytes, peak)
            self._window.is_observed = True
            self._is_under_way = False
            self._meter.reset_peak()

    def _must_offload(self, layer: int) -> bool:
        """Says whether the pass that measures offloads a layer, since its memory is used up.

        Ranks may differ in this, since they send the same messages in both cases.
        """
        if self._host is None or self._is_sample(layer):
            return False
        return self._allocated[-1] >= self._measuring_limit

    def _is_sample(self, layer: int) -> bool:
        """Says whether a layer is among the last two of its kind, which stay on their rungs so that
        both rungs are measured."""
        return self._kinds[layer + 1 :].count(self._kinds[layer]) < 2

    def _start_window(self, expected_bytes: int, rest_bytes: int) -> None:
        self._meter.reset_peak()
        self._window = Window(expected_bytes, rest_bytes)

    def _expected_bytes(self, rest_bytes: int) -> int:
        """Peak of a pass under the present policies that begins with `rest_bytes` allocated."""
        return self._window.peak_bytes + max(0, rest_bytes - self._window.rest_bytes)

    def _most_climbs(self, fits: Callable[[int, int], bool]) -> int:
        """The greatest number of climbs that fits, and at least the fewest there may be.

        `fits(less, more)` gets the bytes that layers would keep less and more than now. Where a
        number of climbs does not fit, no greater one does.
        """
        num_layers = len(self._kinds)
        climbs = range(self._fewest_climbs + 1, 2 * num_layers + 1)

        def is_too_many(number: int) -> bool:
            return not fits(*self._change_bytes(self.policies, after_climbs(number, num_layers)))

        return self._fewest_climbs + bisect_left(climbs, True, key=is_too_many)

    def _change_bytes(
        self, before: Sequence[LayerPolicy], after: Sequence[LayerPolicy]
    ) -> tuple[int, int]:
        """Bytes that layers which step down keep less, and that layers which climb keep more.

        Both are summed over all passes that are alive. Savings don't offset additions, since the
        peak may be where a layer that steps down is recomputed. So what climbing layers add is a
        bound, and what the others save shows in the next pass.
        """
        less = more = 0
        for extra, old, new in zip(self._extra, before, after, strict=True):
            change = extra.of(new) - extra.of(old)
            less, more = less + max(0, -change), more + max(0, change)
        return self._window.at_once * less, self._window.at_once * more
