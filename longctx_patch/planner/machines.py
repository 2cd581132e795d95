"""The one table of machines: what every prediction knows of GPUs, their kernels, links and host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from longctx_patch.config import GPUS_PER_NODE, HardwareName
from longctx_patch.plans.recurrent import RecurrenceKind
from longctx_patch.plans.types import Direction
from longctx_patch.sequence.regions import FULL, Piece

GIB = 2**30

HEAD_DIM = 128
"""Numbers of a head that kernels were measured with, unless their rates say otherwise."""

_FEW_QUERIES = 256
"""Fewer queries than this take a kernel as long as this many: short documents don't fill tiles.
Fitted to a row of 300 documents on 4 H200."""


@dataclass(frozen=True)
class KernelRate:
    """Time of an attention kernel call: a fixed time, and FLOPs at a rate that grows with keys."""

    peak_flops: float
    """FLOP/s that long blocks reach."""
    half_tokens: float
    """Number of keys at which a block reaches half of `peak_flops`."""
    fixed_s: float
    """Seconds of the smallest call."""

    def seconds(self, flops: float, num_keys: float) -> float:
        """Seconds of a block without `fixed_s`."""
        return flops / self.peak_flops * (1 + self.half_tokens / num_keys)


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Holds what one attention kernel reaches on one kind of GPU."""

    kernel: str
    """Its name in `longctx_patch.kernels`."""
    forward_full: KernelRate
    forward_causal: KernelRate
    backward_full: KernelRate
    backward_causal: KernelRate
    other_head_dims: tuple[tuple[int, "KernelRates"], ...] = ()
    """(numbers of a head, what is reached from that size on), narrowest first. The rates of this
    object are those of heads of `HEAD_DIM`."""

    def of(self, head_dim: int) -> "KernelRates":
        """Returns what is reached with heads of this size: as with the next smaller size that was
        measured, or with the smallest one."""
        measured = dict(sorted([*self.other_head_dims, (HEAD_DIM, self)]))
        smaller = [rates for size, rates in measured.items() if size <= head_dim]
        return smaller[-1] if smaller else next(iter(measured.values()))

    def rate(self, direction: Direction, *, causal: bool) -> KernelRate:
        """The rate of blocks in one direction, causal or full."""
        if direction is Direction.FORWARD:
            return self.forward_causal if causal else self.forward_full
        return self.backward_causal if causal else self.backward_full

    def scaled(self, share: float) -> "KernelRates":
        """Returns those of a GPU that computes at `share` of this one's rate."""

        def slower(rate: KernelRate) -> KernelRate:
            return replace(rate, peak_flops=share * rate.peak_flops)

        return replace(
            self,
            forward_full=slower(self.forward_full),
            forward_causal=slower(self.forward_causal),
            backward_full=slower(self.backward_full),
            backward_causal=slower(self.backward_causal),
        )


@dataclass(frozen=True)
class RecurrentRates:
    """FLOP/s that the chunked kernels of recurrences reach, by the FLOPs of
    `longctx_patch.planner.recurrent_cost`."""

    delta_rule: float
    """flash-linear-attention's `chunk_gated_delta_rule`."""
    delta_rule_by_channel: float
    """flash-linear-attention's `chunk_kda`."""
    state_space: float
    """mamba-ssm's `mamba_chunk_scan_combined`."""
    measured: frozenset[RecurrenceKind]
    """On H100. The others are a share of matrix products, which nobody has measured."""

    def source(self, kind: RecurrenceKind) -> str:
        """Returns where a rate is from."""
        return "measured on H100" if kind in self.measured else "estimated"

    def flops(self, kind: RecurrenceKind) -> float:
        rates = {
            "delta rule": self.delta_rule,
            "delta rule by channel": self.delta_rule_by_channel,
            "Mamba-2": self.state_space,
        }
        return rates[kind]


@dataclass(frozen=True)
class Link:
    """One rank's way to others, the same in both directions at once."""

    bandwidth: float
    """Bytes per second."""
    latency_s: float
    """Seconds of the smallest exchange, its start on both sides included."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU, the node it is in, and the links between nodes; every GPU has its own NIC.

    Rates are those that hold in a training step, at the GPU's power limit.
    """

    name: HardwareName
    device: str
    """Words of the GPU's name as torch reports it, in lower case."""
    is_measured: bool = True
    """Whether rates are measured or published; otherwise they are assumed by the data sheet."""
    memory_bytes: float
    """Memory of a GPU as torch reports it."""
    kernels: KernelRates
    matmul_flops: float
    """FLOP/s of large bfloat16 matrix products."""
    peak_flops: float
    """FLOP/s of the data sheet, dense bfloat16; MFU is a share of this."""
    recurrent: RecurrentRates
    """What kernels of recurrent layers reach."""
    copy_bandwidth: float
    """Bytes per second that element-wise passes reach, counting what must be read and written."""
    add_bandwidth: float
    """The same for adding a result to a float32 total."""
    merge_bandwidth: float
    """The same for merging outputs by their log-sum-exp, which takes several passes."""
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
    """Seconds of the CPU for each message in a batch."""
    host_ulysses_s: float
    """Seconds of the CPU for Ulysses around a plan: packing, two all-to-alls, unpacking."""
    host_out_bandwidth: float
    """Bytes per second of pinned copies to the host while all GPUs of the node copy."""
    host_in_bandwidth: float
    """Bytes per second of pinned copies from the host while all GPUs of the node copy."""

    @property
    def note(self) -> str:
        """What a reader of a prediction has to know of its rates; empty where they are known."""
        return "" if self.is_measured else "rates by data sheet, not measured"

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
        kernels = self.kernels.of(head_dim)
        rate = kernels.rate(direction, causal=pieces[0].rule != FULL)
        return rate.fixed_s + sum(
            rate.seconds(
                per_pair * piece.area * max(1.0, _FEW_QUERIES / piece.q.size),
                min(piece.kv.size, 2 * piece.area / piece.q.size),
            )
            for piece in pieces
            if piece.area
        )

    def with_free_links(self) -> "Hardware":
        """The same machine, if messages took no time."""
        free = Link(bandwidth=inf, latency_s=0.0)
        return replace(self, intra_node=free, inter_node=free, overlap_slowdown=0.0)


# H100 and H200 have the same chip. cuDNN's rates are those of benchmarks/calibrate.py on an H200
# under sustained load; flash-attn 4's, which `kernel="auto"` takes where it is installed, were
# measured inside of training steps on H200. cuDNN's backward of heads of 256 numbers is slower: of
# steps of Qwen3.5-9B's widths on 2 H100 (docs/results/performance.md) the faster GPU took 0.95 s
# for it in two layers, for which the rates of heads of 128 give 0.67 s. `auto` takes cuDNN there,
# which was faster than flash-attn 4. The A100's are those published for FlashAttention-2.
_CUDNN_WIDE = KernelRates(
    kernel="cudnn",
    forward_full=KernelRate(625e12, 50, 14e-6),
    forward_causal=KernelRate(615e12, 430, 18e-6),
    backward_full=KernelRate(382e12, 100, 41e-6),
    backward_causal=KernelRate(378e12, 800, 50e-6),
)
# Fitted to the two steps of Llama-3.2-1B's shape in docs/results/planner.md.
_FLASH_ATTN_4_64 = KernelRates(
    kernel="flash_attn_4",
    forward_full=KernelRate(565e12, 50, 14e-6),
    forward_causal=KernelRate(560e12, 430, 18e-6),
    backward_full=KernelRate(520e12, 100, 41e-6),
    backward_causal=KernelRate(510e12, 800, 50e-6),
)
_FLASH_ATTN_4 = KernelRates(
    kernel="flash_attn_4",
    forward_full=KernelRate(650e12, 50, 14e-6),
    forward_causal=KernelRate(645e12, 430, 18e-6),
    backward_full=KernelRate(595e12, 100, 41e-6),
    backward_causal=KernelRate(583e12, 800, 50e-6),
    other_head_dims=((64, _FLASH_ATTN_4_64), (256, _CUDNN_WIDE)),
)
_FLASH_ATTN_2 = KernelRates(
    kernel="flash_attn_2",
    forward_full=KernelRate(195e12, 50, 14e-6),
    forward_causal=KernelRate(190e12, 430, 18e-6),
    backward_full=KernelRate(175e12, 100, 41e-6),
    backward_causal=KernelRate(170e12, 800, 50e-6),
)

# `RecurrentShape.run_flops * tokens / seconds` for the forward of a shard. Measured on
# H100, which computes as fast as an H200: delta rules, by a forward over two ranks, which is two
# shards' after one another (docs/results/performance.md). It is 0.1 of the rate of large matrix
# products: these kernels compute small ones and pass states from chunk to chunk. A decay per
# channel adds work to each. Estimated: 0.05 and 0.25 of that rate.
_H200_RECURRENT = RecurrentRates(
    delta_rule=70e12,
    delta_rule_by_channel=34e12,
    state_space=171e12,
    measured=frozenset({"delta rule"}),
)
_A100_RECURRENT = RecurrentRates(
    delta_rule=23e12, delta_rule_by_channel=11e12, state_space=58e12, measured=frozenset()
)

# The H200's memory, links and host are rounded from benchmarks/calibrate.py on 4 GPUs of a host
# (torch 2.11, CUDA 13.0, NCCL). Within a step of 131,072 tokens on 4 GPUs, the layers' matrix
# products ran at 694 TFLOP/s and the head's at 661. Host links were measured with all four GPUs
# copying. The H100 (SXM) has 0.7 of the H200's memory bandwidth. The A100's memory, links and
# matrix products are scaled by data sheets.
_H200 = Hardware(
    name="h200",
    device="h200",
    memory_bytes=139.8 * GIB,
    kernels=_FLASH_ATTN_4,
    matmul_flops=685e12,
    peak_flops=989e12,
    recurrent=_H200_RECURRENT,
    copy_bandwidth=4.27e12,
    add_bandwidth=2.85e12,
    merge_bandwidth=1.54e12,
    gpus_per_node=GPUS_PER_NODE,
    intra_node=Link(240e9, 20e-6),
    inter_node=Link(45e9, 30e-6),
    overlap_slowdown=0.89,
    host_forward_s=120e-6,
    host_backward_s=140e-6,
    host_exchange_s=80e-6,
    host_message_s=15e-6,
    host_ulysses_s=900e-6,
    host_out_bandwidth=34 * GIB,
    host_in_bandwidth=41 * GIB,
)
_H100 = replace(
    _H200,
    name="h100",
    device="h100",
    memory_bytes=79.1 * GIB,
    copy_bandwidth=3.0e12,
    add_bandwidth=2.0e12,
    merge_bandwidth=1.08e12,
)
_A100 = replace(
    _H200,
    name="a100",
    device="a100",
    memory_bytes=79.2 * GIB,
    kernels=_FLASH_ATTN_2,
    matmul_flops=230e12,
    peak_flops=312e12,
    recurrent=_A100_RECURRENT,
    copy_bandwidth=1.75e12,
    add_bandwidth=1.2e12,
    merge_bandwidth=0.65e12,
    intra_node=Link(160e9, 20e-6),
    inter_node=Link(22e9, 30e-6),
    host_out_bandwidth=17 * GIB,
    host_in_bandwidth=20 * GIB,
)
_A100_40 = replace(_A100, name="a100-40", memory_bytes=39.4 * GIB)

_A100_SHEET_BANDWIDTH = 2.039e12
_PCIE_4 = 31.5e9
"""Bytes per second, each way, of 16 lanes of PCIe 4, by which the A100 copies to its host."""


def _card(
    name: HardwareName,
    device: str,
    *,
    memory_gib: float,
    peak_flops: float,
    bandwidth: float,
    pcie: float = _PCIE_4,
) -> Hardware:
    """A card without NVLink, by its data sheet.

    Assumed: of the data sheet's rates, matrix products, attention (flash-attn 2), recurrences,
    passes over memory and copies to the host reach the A100's share. Messages between cards go
    through the host's memory at a third of PCIe's rate, and the machine has one port of 100 Gbit/s.

    Args:
        memory_gib: as torch reports it, with error correction where the card has it.
        peak_flops: dense bfloat16 with sums in float32.
        bandwidth: of the memory, in bytes per second.
        pcie: bytes per second each way.
    """
    flops, memory, host = (
        peak_flops / _A100.peak_flops,
        bandwidth / _A100_SHEET_BANDWIDTH,
        pcie / _PCIE_4,
    )
    recurrent = _A100_RECURRENT
    return replace(
        _A100,
        name=name,
        device=device,
        is_measured=False,
        memory_bytes=memory_gib * GIB,
        kernels=_FLASH_ATTN_2.scaled(flops),
        matmul_flops=flops * _A100.matmul_flops,
        peak_flops=peak_flops,
        recurrent=replace(
            recurrent,
            delta_rule=flops * recurrent.delta_rule,
            delta_rule_by_channel=flops * recurrent.delta_rule_by_channel,
            state_space=flops * recurrent.state_space,
        ),
        copy_bandwidth=memory * _A100.copy_bandwidth,
        add_bandwidth=memory * _A100.add_bandwidth,
        merge_bandwidth=memory * _A100.merge_bandwidth,
        intra_node=Link(pcie / 3, 30e-6),
        inter_node=Link(12.5e9 / GPUS_PER_NODE, 50e-6),
        host_out_bandwidth=host * _A100.host_out_bandwidth,
        host_in_bandwidth=host * _A100.host_in_bandwidth,
    )


# NVIDIA's data sheets, and the white papers of GeForce cards, whose tensor cores sum in float32 at
# half the rate that headlines have.
_CARDS = (
    _card("l40s", "l40s", memory_gib=44.4, peak_flops=362e12, bandwidth=0.864e12),
    _card("a6000", "rtx a6000", memory_gib=44.4, peak_flops=154.8e12, bandwidth=0.768e12),
    _card("rtx6000-ada", "rtx 6000 ada", memory_gib=44.4, peak_flops=364e12, bandwidth=0.96e12),
    _card(
        *("rtx5090", "rtx 5090"),
        memory_gib=31.4,
        peak_flops=209.5e12,
        bandwidth=1.792e12,
        pcie=2 * _PCIE_4,
    ),
    _card("rtx4090", "rtx 4090", memory_gib=23.6, peak_flops=165.2e12, bandwidth=1.008e12),
)

MACHINES: Mapping[str, Hardware] = MappingProxyType(
    {hardware.name: hardware for hardware in (_H200, _H100, _A100, _A100_40, *_CARDS)}
)
"""Machines of up to 8 GPUs, each with the kernel that every command predicts by. All but cards have
NVLink and 8 NICs (200 Gbit/s for the A100, 400 for the others)."""

_SLOWER_CARDS = ("pcie", "nvl", "laptop", "d")
"""Words in the names of cards with the same chip, less power and other links."""


def machine_of(name: str, memory_bytes: float) -> Hardware | None:
    """The machine of a GPU, by its name and memory as torch reports them; None where there are no
    rates of it."""
    words = name.lower().replace("-", " ").split()
    if any(word in words for word in _SLOWER_CARDS):
        return None
    near = (
        machine
        for machine in MACHINES.values()
        if f" {machine.device} " in f" {' '.join(words)} "
        and abs(machine.memory_bytes / memory_bytes - 1) < 0.1
    )
    return next(near, None)
