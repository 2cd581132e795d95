"""Predicts one recurrent layer on a machine, by each of the two ways that its recurrence has.

- **states**: the chain goes over all ranks of the sequence group. Before states travel, a rank runs
  the segments that begin a document, and finds the maps of the others; afterwards it runs these.
- **heads**: heads are exchanged for tokens in the Ulysses group, and the chain goes over the ring.

A rank waits for the slowest one where states travel. A recompute that has others' items from
forward (`Recompute`) waits for none: each rank runs its own segments. Kernels are counted by their
FLOPs at the rate in the table of machines. Where a kernel takes one document at a time (Mamba-2's,
and all for a batch of several rows), the CPU launches a call for each, and bounds rows of short
ones. The projections and the convolution are the same by both ways and are not counted; neither is
composing maps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from longctx_patch.config import LongContextConfig
from longctx_patch.memory.policies import POLICIES, LayerPolicy
from longctx_patch.planner.machines import Hardware
from longctx_patch.plans.chain import ChainTraffic, make_chain
from longctx_patch.plans.recurrent import (
    RecurrentShape,
    RecurrentWay,
    decide_recurrence,
    packets,
)
from longctx_patch.plans.recurrent_traffic import (
    Row,
    exchanges_traffic,
    item_bytes,
    of_one_rank,
    recurrence_traffic,
    states_traffic,
)
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout

BACKWARD = 2.6
"""Seconds of backward for each of forward: it computes the inner states again, and each product has
two gradients. Measured for delta rules (docs/results/performance.md), estimated for others."""

HOST_CALL_S = 300e-6
"""Seconds of the CPU for one call of such a kernel, which launches several. Estimated."""


Recompute = Literal["none", "replay", "whole"]
"""What a step runs of a layer besides forward and backward: nothing; its forward pass with the
items of other ranks from the first one; or its forward pass with all exchanges."""


def recompute_under(policy: LayerPolicy, share: float) -> Recompute:
    """Returns what a step runs again of a recurrent layer under a policy that keeps attention for a
    share of the tokens."""
    record = POLICIES[policy]
    if not record.recomputes_layer:
        return "none"
    return "replay" if record.replays(share) else "whole"


@dataclass(frozen=True, kw_only=True)
class RecurrencePrediction:
    """Holds what one layer's recurrence takes, by one way."""

    way: RecurrentWay
    forward_s: float
    backward_s: float
    replay_s: float
    """A recompute that has the items of other ranks from the first forward."""
    traffic: tuple[ChainTraffic, ...]
    """What each rank sends for the recurrence; the convolution's tails are not in it."""
    mapped_share: float
    """Share of a rank's tokens whose map is found, which runs the kernel on them once more; of the
    rank where it is largest."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks send, in forward and in backward."""
        return sum(t.forward.bytes + t.backward.bytes for t in self.traffic)

    def seconds(self, recompute: Recompute = "none") -> float:
        """Seconds of a step."""
        again = {"none": 0.0, "replay": self.replay_s, "whole": self.forward_s}[recompute]
        return self.forward_s + again + self.backward_s


@lru_cache(maxsize=1024)
def predict_recurrence(
    shape: RecurrentShape, row: Row, way: RecurrentWay, hardware: Hardware
) -> RecurrencePrediction:
    """Raises ValueError for a layout that chains can't have, or heads that can't be exchanged."""
    layout = row.layout if way == "states" else row.ring_layout
    if way == "states":
        passes = _chain_passes(shape, layout, row, hardware)
    else:
        chain = _chain_passes(of_one_rank(shape, row.ulysses), layout, row, hardware)
        exchanges = [
            _exchange_seconds(sent, shape, row, hardware)
            for sent in zip(*exchanges_traffic(shape, row), strict=True)
        ]
        passes = _Passes(*map(_Seconds.plus, chain, exchanges))
    works = make_chain(layout, row.documents).work
    return RecurrencePrediction(
        way=way,
        forward_s=passes.forward.longest,
        backward_s=passes.backward.longest,
        replay_s=passes.replay.longest,
        traffic=recurrence_traffic(shape, row, way),
        mapped_share=max(each.mapped / max(1, each.begun + each.continued) for each in works),
    )


class _Seconds(NamedTuple):
    """How long one pass takes."""

    device: float
    host: float
    """The CPU's seconds: it launches while the device computes."""

    def plus(self, other: "_Seconds") -> "_Seconds":
        return _Seconds(self.device + other.device, self.host + other.host)

    @property
    def longest(self) -> float:
        return max(self)


class _Passes(NamedTuple):
    """In the order of `ChainTraffic`."""

    forward: _Seconds
    backward: _Seconds
    replay: _Seconds


def _chain_passes(shape: RecurrentShape, layout: Layout, row: Row, hardware: Hardware) -> _Passes:
    """Predicts a recurrence over a chain: what ranks compute before states travel, the states'
    way, and what they compute after it. In a replay with kept items each rank computes all at
    once. The CPU launches one call for each segment's output, or for several whole documents,
    and each map."""
    chain = make_chain(layout, row.documents)
    rate = hardware.recurrent.flops(shape.kind)
    run_s, map_s = (flops / rate for flops in (shape.run_flops, shape.map_flops))
    before = [work.begun * run_s + work.mapped * map_s for work in chain.work]
    after = [work.continued * run_s for work in chain.work]
    joins = shape.facts.joins_documents and shape.batch == 1
    runs = chain.runs if joins else chain.of_rank
    calls = [len(runs(rank)) for rank in range(chain.num_ranks)]
    for number in chain.needed:
        if not chain.segments[number].begins:
            calls[chain.segments[number].rank] += 1
    compute_s = max(before) + max(after)
    sent = [way for traffic in states_traffic(shape, chain) for way in traffic]
    travel_s = _travel_seconds(sent, hardware, is_near=_in_node(row.ring * row.ulysses, hardware))
    launch_s = max(calls) * HOST_CALL_S
    host_s = launch_s + hardware.host_exchange_s * any(chain.states)
    forward = replay = _Seconds(compute_s + travel_s, host_s)
    if chain.is_kept(chain.states, partial(item_bytes, shape, chain)):
        replay = _Seconds(max(map(sum, zip(before, after, strict=True))), launch_s)
    backward = _Seconds(BACKWARD * compute_s + travel_s, host_s)
    return _Passes(forward, backward, replay)


def _in_node(num_ranks: int, hardware: Hardware) -> bool:
    return num_ranks <= hardware.gpus_per_node


def _travel_seconds(sent: Sequence[Traffic], hardware: Hardware, *, is_near: bool) -> float:
    """Seconds until the rank that sends most has sent; gradients take the same way back."""
    largest = max(traffic.bytes for traffic in sent)
    link = hardware.intra_node if is_near else hardware.inter_node
    return link.latency_s + largest / link.bandwidth if largest else 0.0


def _exchange_seconds(
    sent: Sequence[Traffic], shape: RecurrentShape, row: Row, hardware: Hardware
) -> _Seconds:
    """One pass's exchanges of heads: each all-to-all starts, bytes travel, and what a rank has is
    packed and unpacked, and its own part copied in between, each of which reads and writes."""
    largest = max(traffic.bytes for traffic in sent)
    own = largest / max(1, row.ulysses - 1)
    near = _in_node(row.ulysses, hardware)
    link = hardware.intra_node if near else hardware.inter_node
    number = 1 + len(packets([(tensor.dim, tensor.itemsize) for tensor in shape.inputs]))
    travel_s = number * link.latency_s + largest / link.bandwidth
    return _Seconds(
        device=travel_s + (4 * (own + largest) + 2 * own) / hardware.copy_bandwidth,
        host=number * hardware.host_ulysses_s / 2,  # which counts two
    )


class RecurrentWork(NamedTuple):
    """A layer's recurrence over a row."""

    shape: RecurrentShape
    documents: Documents


def predict_decided(
    config: LongContextConfig, work: RecurrentWork, hardware: Hardware
) -> RecurrencePrediction:
    """Returns what a recurrence takes by the way that a config would go on a machine."""
    row = row_of(config, work.documents)
    way = decide_recurrence(config.recurrent_exchange, *work, ulysses=row.ulysses, ring=row.ring)
    return predict_recurrence(work.shape, row, way, hardware)


def recompute_of(config: LongContextConfig) -> Recompute:
    """Returns what a step runs again of a recurrent layer; under `auto` that of most layers."""
    return recompute_under(POLICIES[config.checkpoint].rungs[0], config.attention_kept)


def row_of(config: LongContextConfig, documents: Documents) -> Row:
    """A row, as the config places it."""
    return Row(
        documents=documents,
        placement=config.placement_of(documents),
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )
