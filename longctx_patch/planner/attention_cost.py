"""Predicts an attention call on a machine: Ulysses around the schedule of the ring part.

`predict` answers for one setting. Nothing here needs a device.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from longctx_patch.planner.machines import Hardware
from longctx_patch.planner.simulate import Simulation, Span, simulate
from longctx_patch.plans import AttentionShape, Direction, Traffic
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.head_split import (
    QKV,
    Heads,
    HeadSplit,
    to_heads_traffic,
    to_tokens_traffic,
)
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import even_cuts
from longctx_patch.sequence.masks import Mask, documents_mask
from longctx_patch.sequence.placement import place

_MOST_TOKENS, _MOST_BYTES = 2**40, 2**60  # so that 64-bit sums over steps and ranks don't overflow


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call over a whole sequence, causal within documents and a window if any."""

    num_tokens: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    itemsize_bytes: int = 2
    latent_dim: int | None = None
    """Numbers of a token's latent, which travels in place of keys and values where there is no
    Ulysses and no rank gathers all keys; None: there is none."""
    expansion: int | None = None
    """Weights that turn one token's latent into keys and values of all heads; None: what ranks take
    to expand latents is not counted."""
    lengths: tuple[int, ...] = ()
    """Tokens of each document of a packed row; none: the row is one document."""
    parents: tuple[int, ...] = ()
    """The earlier document that each document goes on from, -1 for none; none: no one does."""
    window: int | None = None
    """Keys that a token sees at most, itself included; None: all of its document."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}={value}: it must be 1 or more.")
        size = self.batch * self.num_tokens * self.num_heads * self.head_dim * self.itemsize_bytes
        if self.num_tokens > _MOST_TOKENS or size > _MOST_BYTES:
            raise ValueError(
                f"{self}: queries of {size:.2g} bytes. The model counts up to 2**40 tokens and "
                "2**60 bytes. Use smaller sizes."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: query heads group "
                "evenly over key-value heads. Use a divisor of num_heads."
            )
        Documents(self.lengths, self.num_tokens, self.parents)  # refuses what doesn't fit

    def documents(self) -> Documents:
        """The documents of the row."""
        return Documents.of_row(self.lengths, self.num_tokens, self.parents)

    def mask(self) -> Mask:
        return documents_mask(self.documents(), window=self.window)

    @property
    def is_causal(self) -> bool:
        """Says whether the mask is plainly causal: nothing of the triangle is left out."""
        return self.documents().is_one and (self.window or self.num_tokens) >= self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Holds what one direction of an attention call takes; tuples are by rank."""

    plan: str
    ranks: int
    direction: Direction
    ulysses_degree: int
    layout: str
    makespan_s: float
    host_s: float
    """Seconds that the busiest rank's CPU takes to start the plan's kernels and messages."""
    host_ulysses_s: float
    """The same of Ulysses' exchanges around the plan."""
    idle_fraction: float
    """Imbalance: share of rank-time without work, if only attention's FLOPs counted and each step
    took as long as its busiest rank. It says nothing about a `halo` plan, whose ranks don't go step
    by step."""
    kernel_s: float
    """Mean of the ranks' seconds in attention's kernels."""
    copy_s: float
    """Mean of the ranks' seconds of copying and adding."""
    waiting_fraction: float
    """Share of the GPUs' time in which they neither compute nor copy."""
    exposed_communication_s: float
    """What the makespan would lose if messages took no time."""
    bytes_sent_per_rank: tuple[int, ...]
    messages_per_rank: tuple[int, ...]
    peak_buffer_bytes: int
    """Bytes that the rank that holds most has beside its own tensors and results."""
    timeline: tuple[Span, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Everything but the timeline, in types that JSON has."""
        values = asdict(replace(self, timeline=()))
        del values["timeline"]
        return values | {
            "direction": self.direction.value,
            "bytes_sent_per_rank": list(self.bytes_sent_per_rank),
            "messages_per_rank": list(self.messages_per_rank),
        }


@lru_cache(maxsize=4096)
def predict(
    setting: Setting,
    direction: Direction,
    workload: Workload,
    hardware: Hardware,
    *,
    with_timeline: bool = False,
) -> Prediction:
    """Simulate one direction of one call."""
    split = HeadSplit(workload.num_heads, workload.num_kv_heads, setting.ulysses_degree)
    shapes = [_ring_shape(setting, workload, split, rank) for rank in range(setting.ulysses_degree)]
    of_shape = {
        shape: _simulate_ring(setting, direction, workload, hardware, shape, with_timeline)
        for shape in set(shapes)
    }
    rings = [of_shape[shape] for shape in shapes]
    slowest = max(rings, key=lambda ring: ring.makespan_s)
    exchanges = _exchanges(setting, direction, workload, split)
    before, after = (_all_to_all(part, setting, hardware) for part in exchanges)
    expanded_s = _expanded_before(setting, direction, workload, hardware)
    # The CPU runs ahead of the device unless it takes longer in total.
    on_device_s = expanded_s + before.total_s + slowest.makespan_s + after.total_s
    exchanges_s = hardware.host_ulysses_s if setting.ulysses_degree > 1 else 0.0
    on_host_s = slowest.host_s + exchanges_s
    sent = _sum_traffic(exchanges, rings)
    busiest = max(cut.size for cut in split.query)
    mean = workload.num_heads / setting.ulysses_degree
    makespan_s = max(on_device_s, on_host_s)
    kernel_s = sum(ring.kernel_s for ring in rings) / len(rings) + expanded_s
    copy_s = sum(ring.copy_s for ring in rings) / len(rings) + before.copy_s + after.copy_s
    messages_s = before.travel_s + slowest.exposed_communication_s + after.travel_s
    return Prediction(
        plan=setting.name(direction),
        ranks=setting.ulysses_degree * setting.ring_degree,
        direction=direction,
        ulysses_degree=setting.ulysses_degree,
        layout=setting.layout,
        makespan_s=makespan_s,
        host_s=slowest.host_s,
        host_ulysses_s=exchanges_s,
        idle_fraction=1 - (1 - slowest.idle_fraction) * mean / busiest,
        kernel_s=kernel_s,
        copy_s=copy_s,
        waiting_fraction=max(0.0, 1 - (kernel_s + copy_s) / makespan_s),
        exposed_communication_s=makespan_s - max(on_device_s - messages_s, on_host_s),
        bytes_sent_per_rank=tuple(traffic.bytes for traffic in sent),
        messages_per_rank=tuple(traffic.messages for traffic in sent),
        peak_buffer_bytes=max(ring.peak_buffer_bytes for ring in rings)
        + _widest_exchange(setting, workload, split),
        timeline=_timeline(setting, slowest, expanded_s + before.total_s, after.total_s)
        if with_timeline
        else (),
    )


def _ring_shape(
    setting: Setting, workload: Workload, split: HeadSplit, ulysses_rank: int
) -> AttentionShape:
    """Returns what one Ulysses rank's ring computes."""
    latent_dim = (workload.latent_dim or 0) if setting.may_send_latents else 0
    return AttentionShape(
        batch=workload.batch,
        num_heads=split.query[ulysses_rank].size,
        num_kv_heads=1 if latent_dim else split.num_kv_computed(ulysses_rank),
        head_dim=workload.head_dim,
        itemsize_bytes=workload.itemsize_bytes,
        latent_dim=latent_dim,
        expansion=(workload.expansion or 0) if latent_dim else 0,
    )


def _expanded_before(
    setting: Setting, direction: Direction, workload: Workload, hardware: Hardware
) -> float:
    """Seconds in which a rank expands the latents of its own tokens, where heads travel: once, by
    one product; in backward there are those of two gradients."""
    if workload.latent_dim is None or setting.may_send_latents:
        return 0.0
    ranks = setting.ring_degree * setting.ulysses_degree
    products = 1 if direction is Direction.FORWARD else 2
    weights = workload.batch * (workload.expansion or 0)
    return 2 * products * weights * -(-workload.num_tokens // ranks) / hardware.matmul_flops


def _simulate_ring(
    setting: Setting,
    direction: Direction,
    workload: Workload,
    hardware: Hardware,
    shape: AttentionShape,
    with_timeline: bool,
) -> Simulation:
    in_node = max(1, hardware.gpus_per_node // setting.ulysses_degree)
    return simulate(
        setting.schedule(direction, workload.documents(), workload.mask(), shape.num_kv_heads),
        shape,
        hardware,
        ranks_per_node=setting.ranks_per_node or in_node,
        with_spans=with_timeline,
    )


def _exchanges(
    setting: Setting, direction: Direction, workload: Workload, split: HeadSplit
) -> tuple[list[Traffic], list[Traffic]]:
    """Returns what each rank sends in Ulysses' exchanges before and after the ring part."""
    if setting.ulysses_degree == 1:
        return [], []
    forward = direction is Direction.FORWARD
    inwards = QKV if forward else (Heads.QUERY,)
    outwards = (Heads.QUERY,) if forward else QKV
    per_head = workload.batch * workload.head_dim * workload.itemsize_bytes
    ring_layout = place(setting.layout, workload.documents(), ring=setting.ring_degree)
    before, after = [], []
    for ring_size in ring_layout.sizes:
        sizes = [cut.size for cut in even_cuts(ring_size, setting.ulysses_degree)]
        for rank, tokens in enumerate(sizes):
            before.append(
                to_heads_traffic(split, inwards, rank, tokens=tokens, bytes_per_head=per_head)
            )
            after.append(
                to_tokens_traffic(split, outwards, rank, sizes=sizes, bytes_per_head=per_head)
            )
    return before, after


def _widest_exchange(setting: Setting, workload: Workload, split: HeadSplit) -> int:
    """Bytes of the largest rank's buffer for the exchange of queries, keys and values, with what a
    rank sends to itself. One such buffer is alive beside the tensors that it brings."""
    degree = setting.ulysses_degree
    if degree == 1:
        return 0
    heads = [sum(split.of(kind)[rank].size for kind in QKV) for rank in range(degree)]
    tokens = -(-workload.num_tokens // (setting.ring_degree * degree))
    # A rank's own tokens with all ranks' heads, or all ranks' tokens with its own heads.
    widest = max(sum(heads), degree * max(heads))
    return workload.batch * tokens * widest * workload.head_dim * workload.itemsize_bytes


class _Exchange(NamedTuple):
    """Seconds that all-to-alls add."""

    travel_s: float
    """Seconds of travel."""
    copy_s: float
    """Seconds of packing and unpacking."""

    @property
    def total_s(self) -> float:
        return self.travel_s + self.copy_s


def _all_to_all(sent: Iterable[Traffic], setting: Setting, hardware: Hardware) -> _Exchange:
    """Seconds for the rank that sends most."""
    largest = max((traffic.bytes for traffic in sent), default=0)
    if not largest:
        return _Exchange(0.0, 0.0)
    degree = setting.ulysses_degree
    near = min(degree, hardware.gpus_per_node)
    far_share = (degree - near) / (degree - 1)
    within, across = hardware.intra_node, hardware.inter_node
    travel = max(
        within.latency_s + largest * (1 - far_share) / within.bandwidth,
        (across.latency_s + largest * far_share / across.bandwidth) if far_share else 0.0,
    )
    copied = 4 * largest / hardware.copy_bandwidth  # pack and unpack, each reads and writes
    return _Exchange(travel, copied)


def _sum_traffic(
    exchanges: tuple[list[Traffic], list[Traffic]], rings: list[Simulation]
) -> list[Traffic]:
    """Returns what each rank sends in all; Ulysses ranks are consecutive."""
    ring_ranks = range(len(rings[0].bytes_sent))
    inside = [
        Traffic(ring.messages[ring_rank], ring.bytes_sent[ring_rank])
        for ring_rank in ring_ranks
        for ring in rings
    ]
    before, after = exchanges
    if not before:
        return inside
    return [a + b + c for a, b, c in zip(before, inside, after, strict=True)]


def _timeline(setting: Setting, ring: Simulation, before: float, after: float) -> tuple[Span, ...]:
    """The spans of the slowest ring for each of its Ulysses ranks, between the exchanges."""
    degree = setting.ulysses_degree
    spans = []
    for rank in range(degree * setting.ring_degree):
        own = [span for span in ring.spans if span.rank == rank // degree]
        spans += [
            span._replace(rank=rank, start_s=span.start_s + before, stop_s=span.stop_s + before)
            for span in own
        ]
        end = before + ring.makespan_s
        if before:
            spans.append(Span(rank, "transfer", 0.0, before, "ALL_TO_ALL"))
        if after:
            spans.append(Span(rank, "transfer", end, end + after, "ALL_TO_ALL"))
    return tuple(spans)
