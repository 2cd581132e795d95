"""The rungs that layers climb under `auto`, what a layer keeps on each, and records of the training
passes from which `auto` decides."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from longctx_patch.memory.policies import POLICIES, LayerPolicy

LADDER = POLICIES["auto"].rungs
"""Policies of a layer, from the cheapest in memory to the cheapest in time."""
LOWEST, MIDDLE, HIGHEST = LADDER
RECENT, SHORT = 8, 2
"""Memory is short if the allocator had to try again in `SHORT` or more of the last `RECENT` passes.
A single one may come from a change in how its memory is laid out."""


class Extra(NamedTuple):
    """Bytes of the device that a layer keeps for backward beyond what it keeps one rung lower."""

    attention: int
    """Bytes on the middle rung beyond the lowest."""
    none: int
    """Bytes on the highest rung beyond the middle one."""

    def of(self, policy: LayerPolicy) -> int:
        """Bytes beyond what the layer keeps on the lowest rung."""
        return sum(self[: LADDER.index(policy)])


def after_climbs(climbs: int, num_layers: int) -> tuple[LayerPolicy, ...]:
    """Policies of all layers, first to last, once layers have climbed `climbs` rungs in all.

    The last layers climb first, and all reach the middle rung before any climbs further.

    Example:
        >>> after_climbs(1, 3), after_climbs(5, 3)
        (('offload', 'offload', 'attention'), ('attention', 'none', 'none'))
    """
    from_last = range(num_layers - 1, -1, -1)
    return tuple(LADDER[(climbs > n) + (climbs > num_layers + n)] for n in from_last)


def to_measure(kinds: Sequence[Hashable]) -> tuple[LayerPolicy, ...]:
    """Policies of the pass that measures: the last layer of each kind is on the highest rung, the
    others are on the middle one."""
    last = {kind: layer for layer, kind in enumerate(kinds)}
    return tuple(HIGHEST if last[kind] == n else MIDDLE for n, kind in enumerate(kinds))


def measured_extra(
    kinds: Sequence[Hashable], kept_bytes: Sequence[int], policies: Sequence[LayerPolicy]
) -> tuple[Extra, ...]:
    """The bytes that each layer keeps, by a pass with one layer of each kind on the highest rung.

    The first layers differ a little (buffers of FSDP, inputs without gradient), so medians are
    taken. Where no layer of a kind was on a rung, the bytes that a layer keeps there count as 0.
    """
    found: dict[Hashable, Extra] = {}
    for kind in set(kinds):
        kept: dict[LayerPolicy, list[int]] = {policy: [] for policy in LADDER}
        for other, num_bytes, policy in zip(kinds, kept_bytes, policies, strict=True):
            if other == kind:
                kept[policy].append(num_bytes)
        lowest, middle, highest = (median_low(kept[p]) if kept[p] else 0 for p in LADDER)
        below = middle or lowest
        found[kind] = Extra(max(0, middle - lowest), max(0, highest - below))
    return tuple(found[kind] for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The measured memory, and the memory that it is compared with."""

    num_tokens: int
    """Tokens of the longest training pass: rows times tokens of the whole sequence."""
    peak_bytes: int
    """Peak of forward and backward under the present policies; a bound until such a pass is
    over."""
    extra_bytes: tuple[Extra, ...]
    """The bytes that each layer keeps on each rung, first layer to last."""
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Predicts what a pass through all layers takes, as a few of them have shown; all are alike."""

    extra_bytes: Extra
    """The bytes that each layer keeps on each rung."""
    host_layers: int
    """The number of layers for which the host has room."""
    peak_bytes: int
    """Peak with the last layer on the highest rung, as many of the first layers on the lowest as
    the host has room for, and the others on the middle one."""
    rest_bytes: int
    """Bytes that are allocated when such a pass begins."""


@dataclass(eq=False)
class Pass:
    """A training pass whose backward is not over."""

    number: int
    num_tokens: int
    window: "Window"
    rest_bytes: int
    peak_before_bytes: int


@dataclass(eq=False)
class Window:
    """The passes since policies changed."""

    peak_bytes: int
    """The expected peak until one was observed, the observed one from then on."""
    rest_bytes: int
    """The most that was allocated at the start of the passes that showed the peak."""
    is_observed: bool = False
    """True once the backward of a longest pass was seen."""
    is_rehearsed: bool = False
    """True if a rehearsal gave the peak instead."""
    at_once: int = 1
    """Passes whose activations are alive at the same time; extras count for each."""
    recent: tuple[bool, ...] = ()
    """For each of the last passes, whether the allocator had to try again."""

    @property
    def is_short(self) -> bool:
        """Says whether the allocator had to try again too often."""
        return sum(self.recent) >= SHORT
