"""What the cost model knows of a machine: kernel rates by shape, memory, links, the host."""

from dataclasses import dataclass, replace
from math import inf

from longctx_patch.masks import Piece
from longctx_patch.plans.types import Direction


@dataclass(frozen=True)
class KernelRate:
    """Time of one attention kernel call: a start, and FLOPs at a rate that grows with the keys."""

    peak_flops: float
    """FLOP/s that long blocks reach."""
    half_tokens: float
    """Keys at which a block reaches half of that."""
    fixed_s: float
    """Seconds of the smallest call."""

    def seconds(self, flops: float, num_keys: int) -> float:
        return self.fixed_s + flops / self.peak_flops * (1 + self.half_tokens / num_keys)


@dataclass(frozen=True)
class Link:
    """One rank's way to others, the same in both directions at once."""

    bandwidth: float
    """Bytes per second."""
    latency_s: float
    """Seconds of the smallest exchange, its start on both sides included."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of node and the links between nodes; every GPU has a NIC of its own."""

    name: str
    forward_full: KernelRate
    forward_causal: KernelRate
    backward_full: KernelRate
    backward_causal: KernelRate
    memory_bandwidth: float
    """Bytes per second that merging, adding and packing reach."""
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    overlap_slowdown: float
    """Seconds that a kernel loses per second of communication beside it."""
    host_call_s: float
    """Seconds of the CPU for one kernel call and what is merged after it."""
    host_message_s: float
    """Seconds of the CPU for one message: packing, posting, waiting."""

    def kernel_seconds(
        self, direction: Direction, piece: Piece, *, batch: int, num_heads: int, head_dim: int
    ) -> float:
        """Seconds of one piece. FLOPs: 2 matrix products forward, 5 backward."""
        products = 2 if direction is Direction.FORWARD else 5
        flops = 2 * products * batch * piece.area * num_heads * head_dim
        return self._rate(direction, causal=piece.causal).seconds(flops, piece.kv.size)

    def with_free_links(self) -> "Hardware":
        """The same machine, if messages took no time."""
        free = Link(bandwidth=inf, latency_s=0.0)
        return replace(self, intra_node=free, inter_node=free, overlap_slowdown=0.0)

    def _rate(self, direction: Direction, *, causal: bool) -> KernelRate:
        if direction is Direction.FORWARD:
            return self.forward_causal if causal else self.forward_full
        return self.backward_causal if causal else self.backward_full


# Kernel, memory, NVLink and host figures of the H200 are fits to benchmarks/calibrate.py; those of
# the others are scaled from it by published kernel rates and data sheets (docs/cost_model.md).
_H200 = Hardware(
    name="h200",
    forward_full=KernelRate(650e12, 400, 10e-6),
    forward_causal=KernelRate(620e12, 800, 10e-6),
    backward_full=KernelRate(560e12, 400, 20e-6),
    backward_causal=KernelRate(540e12, 800, 20e-6),
    memory_bandwidth=2.5e12,
    gpus_per_node=8,
    intra_node=Link(330e9, 20e-6),
    inter_node=Link(45e9, 30e-6),
    overlap_slowdown=0.07,
    host_call_s=50e-6,
    host_message_s=40e-6,
)
