"""What the cost model knows of a machine: kernel rates by shape, memory, links, the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from longctx_patch.config import HardwareName
from longctx_patch.plans.types import Direction
from longctx_patch.sequence.regions import FULL, Piece


@dataclass(frozen=True)
class KernelRate:
    """Time of an attention kernel call: a start, and FLOPs at a rate that grows with the keys."""

    peak_flops: float
    """FLOP/s that long blocks reach."""
    half_tokens: float
    """Keys at which a block reaches half of that."""
    fixed_s: float
    """Seconds of the smallest call."""

    def seconds(self, flops: float, num_keys: float) -> float:
        """Without the start."""
        return flops / self.peak_flops * (1 + self.half_tokens / num_keys)


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

    name: HardwareName
    forward_full: KernelRate
    forward_causal: KernelRate
    backward_full: KernelRate
    backward_causal: KernelRate
    copy_bandwidth: float
    """Bytes per second that element-wise passes reach, counting what must be read and written."""
    add_bandwidth: float
    """The same of adding a result to a float32 total."""
    merge_bandwidth: float
    """The same of merging outputs by their log-sum-exp, which takes several passes."""
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    overlap_slowdown: float
    """Seconds that a kernel loses per second of communication beside it."""
    host_forward_s: float
    """Seconds of the CPU for one forward kernel call and merging its result."""
    host_backward_s: float
    """Seconds of the CPU for one backward kernel call and adding its results."""
    host_exchange_s: float
    """Seconds of the CPU for one batch of messages: packing, posting, waiting."""
    host_message_s: float
    """Seconds of the CPU for each message in it."""
    host_wave_s: float
    """Seconds of the CPU for one of Ulysses' waves: packing, two all-to-alls, putting together."""

    def kernel_seconds(
        self,
        direction: Direction,
        pieces: Sequence[Piece],
        *,
        batch: int,
        num_heads: int,
        head_dim: int,
    ) -> float:
        """Seconds of one call for pieces of one rule. FLOPs: 2 matrix products forward, 5 backward.

        A window is as fast as a causal block in which rows see as many keys on average.
        """
        products = 2 if direction is Direction.FORWARD else 5
        per_pair = 2 * products * batch * num_heads * head_dim
        rate = self._rate(direction, causal=pieces[0].rule != FULL)
        return rate.fixed_s + sum(
            rate.seconds(per_pair * piece.area, min(piece.kv.size, 2 * piece.area / piece.q.size))
            for piece in pieces
            if piece.area
        )

    def with_free_links(self) -> "Hardware":
        """The same machine, if messages took no time."""
        free = Link(bandwidth=inf, latency_s=0.0)
        return replace(self, intra_node=free, inter_node=free, overlap_slowdown=0.0)

    def _rate(self, direction: Direction, *, causal: bool) -> KernelRate:
        if direction is Direction.FORWARD:
            return self.forward_causal if causal else self.forward_full
        return self.backward_causal if causal else self.backward_full


# The H200 figures are rounded from benchmarks/calibrate.py on 4 GPUs of a host (torch 2.11, CUDA
# 13.0, cuDNN's kernels, NCCL), kernel rates as they hold under sustained load. The H100 has the
# same kernels and links and 0.7 of the memory bandwidth; the A100's kernel rates are those
# published for FlashAttention-2, its memory and links scaled by data sheets.
_H200 = Hardware(
    name="h200",
    forward_full=KernelRate(625e12, 50, 14e-6),
    forward_causal=KernelRate(615e12, 430, 18e-6),
    backward_full=KernelRate(545e12, 100, 41e-6),
    backward_causal=KernelRate(540e12, 800, 50e-6),
    copy_bandwidth=4.27e12,
    add_bandwidth=2.85e12,
    merge_bandwidth=1.54e12,
    gpus_per_node=8,
    intra_node=Link(240e9, 20e-6),
    inter_node=Link(45e9, 30e-6),
    overlap_slowdown=0.89,
    host_forward_s=120e-6,
    host_backward_s=140e-6,
    host_exchange_s=80e-6,
    host_message_s=15e-6,
    host_wave_s=900e-6,
)
_H100 = replace(
    _H200, name="h100", copy_bandwidth=3.0e12, add_bandwidth=2.0e12, merge_bandwidth=1.08e12
)
_A100 = replace(
    _H200,
    name="a100",
    forward_full=KernelRate(195e12, 50, 14e-6),
    forward_causal=KernelRate(190e12, 430, 18e-6),
    backward_full=KernelRate(175e12, 100, 41e-6),
    backward_causal=KernelRate(170e12, 800, 50e-6),
    copy_bandwidth=1.75e12,
    add_bandwidth=1.2e12,
    merge_bandwidth=0.65e12,
    intra_node=Link(160e9, 20e-6),
    inter_node=Link(22e9, 30e-6),
)

PRESETS: Mapping[HardwareName, Hardware] = MappingProxyType(
    {hardware.name: hardware for hardware in (_A100, _H100, _H200)}
)
"""Nodes of 8 GPUs with NVLink and 8 NICs (200 Gbit/s for the A100, 400 for the others)."""
