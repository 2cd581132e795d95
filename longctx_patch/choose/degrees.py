"""Degrees of sequence parallelism, by the cost model: how ranks share the attention of a row.

Of plainly causal rows Ulysses is as fast as anything inside a node. Where documents or a window
leave most pairs out there is little to compute, so it counts what is sent: Ulysses sends all heads
of all tokens whatever the mask, a ring what somebody sees, which is nothing where documents stay
whole on their ranks (`longctx_patch.sequence.whole_documents`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from longctx_patch.choose.chooser import choose_for
from longctx_patch.config import LayoutName, LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.machines import Hardware

SAME = 0.02
"""What is as fast to within this share counts as equal."""


class Way(NamedTuple):
    """How ranks share a row."""

    ulysses: int
    ring: int
    layout: LayoutName | None = None
    """None: what a config has by itself."""


def ways(degree: int, *, num_kv_heads: int, gpus_per_node: int) -> list[Way]:
    """Every product of Ulysses in a node, that sends no key-value head twice, and a ring."""
    return [
        Way(ulysses, degree // ulysses)
        for ulysses in range(1, degree + 1)
        if all(number % ulysses == 0 for number in (degree, gpus_per_node, num_kv_heads))
    ]


def preferred(seconds: Mapping[Way, float]) -> Way:
    """Of those that are as fast as the fastest the one with most Ulysses, in the usual layout."""
    fastest = min(seconds.values())
    tied = [way for way, found in seconds.items() if found <= fastest * (1 + SAME)]
    return max(tied, key=lambda way: (way.ulysses, way.layout is None))


def seconds_of_ways(
    layers: Mapping[Workload, float],
    hardware: Hardware,
    degree: int,
    config: LongContextConfig = LongContextConfig(),  # noqa: B008 (frozen)
) -> dict[Way, float]:
    """Predicted seconds of attention, forward and backward, for each way to share a row.

    Args:
        layers: how many layers there are of each kind; all have the same heads. Kinds that differ
            in the documents of the row are shares of a layer.
        hardware: with as many GPUs in a node as there are.
        degree: ranks that share a row.
        config: everything but degrees.

    `contiguous` shards are tried where windows leave all the same to do: where rows aren't packed,
    no layer sees all of its row, and the config would have `zigzag`.
    """
    (num_kv_heads,) = {kind.num_kv_heads for kind in layers}
    found = ways(degree, num_kv_heads=num_kv_heads, gpus_per_node=hardware.gpus_per_node)
    has_windows = not any(kind.lengths or kind.is_causal for kind in layers)
    if has_windows and config.layout is None and config.placement == "zigzag":
        found += [way._replace(layout="contiguous") for way in found if way.ring > 1]
    configs = {
        way: replace(
            config,
            ulysses_degree=way.ulysses,
            ring_degree=way.ring,
            layout=way.layout or config.layout,
        )
        for way in found
    }
    return {
        way: sum(count * _seconds(configs[way], kind, hardware) for kind, count in layers.items())
        for way in found
    }


def _seconds(config: LongContextConfig, workload: Workload, hardware: Hardware) -> float:
    """Of one layer, with the plans that `auto` takes."""
    chosen = {d: choose_for(config, d, workload, hardware) for d in Direction}
    return sum(predict(chosen[d], d, workload, hardware).makespan_s for d in Direction)
