"""What the planner knows of GPUs and the machines they are in."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from longctx_patch.predict.hardware import PRESETS, Hardware, KernelRate

GIB = 2**30
MOST_GPUS = 512
"""More than these take minutes to simulate."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind. Rates are those that hold in a training step, at the GPU's power limit."""

    name: str
    memory_bytes: float
    """As torch reports it."""
    hardware: Hardware
    """Attention kernels, copies and links."""
    matmul_flops: float
    """FLOP/s of large bfloat16 matrix products."""
    peak_flops: float
    """Of the data sheet, dense bfloat16: what MFU is of."""
    host_out_bandwidth: float
    """Bytes per second of pinned copies to the host while all GPUs of the machine copy."""
    host_in_bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind in machines of up to `gpu.hardware.gpus_per_node`."""

    gpu: Gpu
    num_gpus: int
    host_bytes: float | None = None
    """Memory of one machine's host that may be taken; None: not checked."""

    @property
    def gpus_per_node(self) -> int:
        return min(self.num_gpus, self.gpu.hardware.gpus_per_node)

    def __str__(self) -> str:
        return f"{self.num_gpus}x{self.gpu.name.upper()}"


def _with_flash_attn_4(hardware: Hardware) -> Hardware:
    """Measured inside of steps on H200, as the other rates of the presets are cuDNN's."""
    return replace(
        hardware,
        forward_full=KernelRate(650e12, 50, 14e-6),
        forward_causal=KernelRate(645e12, 430, 18e-6),
        backward_full=KernelRate(595e12, 100, 41e-6),
        backward_causal=KernelRate(583e12, 800, 50e-6),
    )


# H200: matrix products of the layers at 694 TFLOP/s and of the head at 661 within a step of 131,072
# tokens on 4 GPUs; host links with all four copying. H100 (SXM): the same chip with less memory;
# A100: the published rates of its kernels, and its matrix products and links by the same share of
# the data sheet.
_H200 = Gpu(
    name="h200",
    memory_bytes=139.8 * GIB,
    hardware=_with_flash_attn_4(PRESETS["h200"]),
    matmul_flops=685e12,
    peak_flops=989e12,
    host_out_bandwidth=34 * GIB,
    host_in_bandwidth=41 * GIB,
)
_H100 = replace(
    _H200,
    name="h100",
    memory_bytes=79.1 * GIB,
    hardware=_with_flash_attn_4(PRESETS["h100"]),
)
_A100 = replace(
    _H200,
    name="a100",
    memory_bytes=79.2 * GIB,
    hardware=PRESETS["a100"],
    matmul_flops=230e12,
    peak_flops=312e12,
    host_out_bandwidth=17 * GIB,
    host_in_bandwidth=20 * GIB,
)
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        **{gpu.name: gpu for gpu in (_H200, _H100, _A100)},
        "a100-40": replace(_A100, name="a100-40", memory_bytes=39.4 * GIB),
    }
)


def parse_cluster(text: str, host_gib: float | None = None) -> Cluster:
    """`4xH200`, or `H200` for one. Raises ValueError for others.

    Example:
        >>> parse_cluster("8xh100").num_gpus
        8
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z]\w*(?:-\w+)?)", text.strip())
    name = match[2].lower() if match else ""
    if match is None or name not in GPUS:
        known = ", ".join(name.upper() for name in GPUS)
        raise ValueError(f"--gpus {text!r}: write a number and a kind, as 4xH200. Kinds: {known}.")
    gpu, count = GPUS[name], int(match[1] or 1)
    per_node = gpu.hardware.gpus_per_node
    if count < 1 or (count > per_node and count % per_node):
        raise ValueError(
            f"--gpus {text!r}: {count} GPUs are no number of whole machines of {per_node}. Use 1 "
            f"to {per_node}, or a multiple of {per_node}."
        )
    if count > MOST_GPUS:
        raise ValueError(f"--gpus {text!r}: the planner knows up to {MOST_GPUS:,} GPUs.")
    if host_gib is not None and not 0 < host_gib < math.inf:
        raise ValueError(f"--host-gib {host_gib}: the host has some memory. Use a number above 0.")
    host_bytes = None if host_gib is None else host_gib * GIB
    return Cluster(gpu=gpu, num_gpus=count, host_bytes=host_bytes)
