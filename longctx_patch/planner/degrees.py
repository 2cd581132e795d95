"""Decide how ranks share the attention of a row: Ulysses and ring degrees, and the layout.

Inside a node Ulysses is as fast as anything for plainly causal rows. Where documents or a window
leave most pairs out there is little to compute, so the bytes sent decide: Ulysses sends all heads
of all tokens whatever the mask; a ring sends only what another rank sees, which is nothing where
documents stay whole on their ranks.

The fastest way wins. The cost model can't order candidates within `TIE` of the fastest better than
chance, so among those the rule takes what measurements favoured:

- The largest Ulysses degree. On 4 H200 with 131,072 causal tokens, 2 x 2 was predicted to take
  1.0 % longer than Ulysses over all four, and took 3 % longer: each kernel call of a ring is
  smaller, and messages compete with it for the device.
- Under equal degrees the fewest bytes, since bytes that are hidden today are the first to show on a
  slower link.
- Then the smallest buffers.

Without a prediction all candidates count as equally fast, and the same rule decides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.machines import MACHINES, Hardware
from longctx_patch.planner.recurrent_cost import RecurrentWork, predict_decided, recompute_of
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.generators.table import PLANS
from longctx_patch.sequence.layout import LayoutName

TIE = 0.015
"""Candidates that are slower than the fastest by at most this share count as equally fast."""

Key = TypeVar("Key")

PLAIN = LongContextConfig()
NO_RECURRENCE: Mapping[RecurrentWork, float] = MappingProxyType({})


class Cost(NamedTuple):
    """Holds what decides between candidates."""

    ulysses_degree: int
    seconds: float = 0.0
    sent_bytes: float = 0.0
    """What all ranks send together."""
    buffer_bytes: float = 0.0

    @classmethod
    def of(cls, predictions: Iterable[tuple[Prediction, float]]) -> "Cost":
        """The cost of (prediction, count): calls that run one after the other, `count` times."""
        calls = list(predictions)
        return cls(
            calls[0][0].ulysses_degree,
            sum(count * found.makespan_s for found, count in calls),
            sum(count * sum(found.bytes_sent_per_rank) for found, count in calls),
            max(found.peak_buffer_bytes for found, _ in calls),
        )

    def plus(self, seconds: float, sent_bytes: float) -> "Cost":
        """The cost with something more that runs before or after."""
        return self._replace(
            seconds=self.seconds + seconds, sent_bytes=self.sent_bytes + sent_bytes
        )


def preferred(costs: Mapping[Key, Cost]) -> Key:
    """The candidate that the rule takes; the first if several are equal."""
    limit = min(cost.seconds for cost in costs.values()) * (1 + TIE)
    tied = {key: cost for key, cost in costs.items() if cost.seconds <= limit}
    return min(
        tied,
        key=lambda key: (-tied[key].ulysses_degree, tied[key].sent_bytes, tied[key].buffer_bytes),
    )


def decide(
    config: LongContextConfig, workload: Workload, hardware: Hardware | None = None
) -> Setting:
    """The setting that a config runs for a workload, by default on the machine that it names."""
    hardware = hardware or MACHINES[config.hardware]
    reuse = workload.num_heads / workload.num_kv_heads
    if workload.latent_dim and config.heads_travel_because() is None:
        reuse = 2 * workload.head_dim * workload.num_heads / workload.latent_dim
    return config.setting_of(
        config.placement_of(workload.documents()),
        num_tokens=workload.num_tokens,
        reuse=reuse,
        is_causal=workload.is_causal,
        gpus_per_node=hardware.gpus_per_node,
    )


def serves(plan: str, direction: Direction) -> bool:
    """Says whether a plan has a direction."""
    return direction in PLANS[plan].directions


def ring_ranks_in_node(ulysses_degree: int, hardware: Hardware) -> int:
    """Ring ranks on one machine, whose Ulysses ranks are consecutive."""
    return max(1, hardware.gpus_per_node // ulysses_degree)


class Way(NamedTuple):
    """Says how ranks share a row."""

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
    recurrent: Mapping[RecurrentWork, float] = NO_RECURRENCE,
) -> Way:
    """The way that the cost model takes; the arguments are those of `costs_of_ways`."""
    return preferred(costs_of_ways(layers, hardware, degree, recurrent=recurrent))


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

    Raises:
        ValueError: no layer has attention.

    `contiguous` shards are tried where windows give all ranks equal work: rows aren't packed, every
    layer has a window, and the config would have `zigzag`.
    """
    if not layers:
        raise ValueError("no layer has attention, which degrees are chosen by. Give the degrees.")
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
