"""Decide how ranks share the attention of a row: Ulysses and ring degrees, and the layout.

Inside a node Ulysses is as fast as anything for plainly causal rows. Where documents or a window
leave most pairs out there is little to compute, so the bytes sent decide: Ulysses sends all heads
of all tokens whatever the mask; a ring sends only what another rank sees, which is nothing where
documents stay whole on their ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from longctx_patch.choose.plans import decide
from longctx_patch.choose.recurrence import RecurrentWork, predict_decided, recompute_of
from longctx_patch.choose.tie import Cost, preferred
from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.machines import Hardware
from longctx_patch.sequence.layout import LayoutName

PLAIN = LongContextConfig()
NO_RECURRENCE: Mapping[RecurrentWork, float] = MappingProxyType({})


class Way(NamedTuple):
    """How ranks share a row."""

    ulysses: int
    ring: int
    layout: LayoutName | None = None
    """None: the config's own."""

    def applied_to(self, config: LongContextConfig) -> LongContextConfig:
        """The config with these degrees, and this layout if there is one."""
        layout = self.layout or config.layout
        return replace(config, ulysses_degree=self.ulysses, ring_degree=self.ring, layout=layout)


def ways(degree: int, *, num_kv_heads: int, gpus_per_node: int) -> list[Way]:
    """All products of a ring and Ulysses that stays in a node and sends no key-value head twice."""
    return [
        Way(ulysses, degree // ulysses)
        for ulysses in range(1, degree + 1)
        if all(number % ulysses == 0 for number in (degree, gpus_per_node, num_kv_heads))
    ]


def most_ulysses(degree: int, *, num_kv_heads: int, gpus_per_node: int) -> Way:
    """The way that is taken where nothing can be predicted, as on CPUs."""
    found = ways(degree, num_kv_heads=num_kv_heads, gpus_per_node=gpus_per_node)
    return preferred({way: Cost(way.ulysses) for way in found})


def best_way(
    layers: Mapping[Workload, float],
    hardware: Hardware,
    degree: int,
    config: LongContextConfig = PLAIN,
    recurrent: Mapping[RecurrentWork, float] = NO_RECURRENCE,
) -> Way:
    """The way that the cost model takes; the arguments are those of `costs_of_ways`."""
    return preferred(costs_of_ways(layers, hardware, degree, config, recurrent))


def costs_of_ways(
    layers: Mapping[Workload, float],
    hardware: Hardware,
    degree: int,
    config: LongContextConfig = PLAIN,
    recurrent: Mapping[RecurrentWork, float] = NO_RECURRENCE,
) -> dict[Way, Cost]:
    """Predicted cost of attention and recurrences, forward and backward, for each way to share a
    row.

    Args:
        layers: how many layers there are of each kind; all have the same heads. For kinds that
            differ in the row's documents, counts are fractions of a layer.
        hardware: the machine; its `gpus_per_node` are the GPUs of a node that the job has.
        degree: ranks that share a row.
        config: everything but degrees.
        recurrent: how many recurrent layers there are, counted in the same way.

    `contiguous` shards are tried where windows give all ranks equal work: rows aren't packed, every
    layer has a window, and the config would have `zigzag`.
    """
    (num_kv_heads,) = {kind.num_kv_heads for kind in layers}
    found = ways(degree, num_kv_heads=num_kv_heads, gpus_per_node=hardware.gpus_per_node)
    has_windows = not any(kind.lengths or kind.is_causal for kind in layers)
    if has_windows and config.layout is None and config.placement == "zigzag":
        found += [way._replace(layout="contiguous") for way in found if way.ring > 1]
    return {way: _cost(way.applied_to(config), layers, hardware, recurrent) for way in found}


def _cost(
    config: LongContextConfig,
    layers: Mapping[Workload, float],
    hardware: Hardware,
    recurrent: Mapping[RecurrentWork, float],
) -> Cost:
    """The cost of all layers, with the plans that `auto` takes."""
    cost = Cost.of(
        (predict(decide(config, kind, hardware), direction, kind, hardware), count)
        for kind, count in layers.items()
        for direction in Direction
    )
    for work, count in recurrent.items():
        found = predict_decided(config, work, hardware)
        cost = cost.plus(count * found.seconds(recompute_of(config)), count * found.sent_bytes)
    return cost
