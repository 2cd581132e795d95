"""The rungs that layers climb under `auto`, and what a layer keeps on each."""

from collections.abc import Hashable, Sequence
from statistics import median_low
from typing import NamedTuple

from longctx_patch.memory.policies import POLICIES, LayerPolicy

LADDER = POLICIES["auto"].rungs
"""Policies of a layer, from the cheapest in memory to the cheapest in time."""
LOWEST, MIDDLE, HIGHEST = LADDER


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
