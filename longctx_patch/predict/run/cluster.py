"""A number of GPUs of one kind, in machines."""

import math
import re
from dataclasses import dataclass, replace

from longctx_patch.predict.machines import GIB, MACHINES, Hardware
from longctx_patch.rules.names import did_you_mean

MOST_GPUS = 512
"""More GPUs would take minutes to simulate."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind in machines of up to `hardware.gpus_per_node`."""

    hardware: Hardware
    num_gpus: int
    host_bytes: float | None = None
    """Memory of one machine's host that may be taken; None: not checked."""

    @property
    def gpus_per_node(self) -> int:
        return min(self.num_gpus, self.hardware.gpus_per_node)

    def fills_nodes(self, degree: int) -> bool:
        """Whether groups of `degree` consecutive GPUs lie within a node or take whole nodes."""
        return gpus_together(degree, self.gpus_per_node) in (degree, self.gpus_per_node)

    def seen_by(self, degree: int) -> Hardware:
        """The machine, with as many GPUs in a node as a group of `degree` surely has together."""
        together = gpus_together(degree, self.gpus_per_node)
        return replace(self.hardware, gpus_per_node=together)

    def __str__(self) -> str:
        return f"{self.num_gpus}x{self.hardware.name.upper()}"


def gpus_together(degree: int, gpus_per_node: int) -> int:
    """How many consecutive GPUs of every group of `degree` lie within one node.

    Groups that don't fill nodes lie across their borders: of groups of 12 in nodes of 8, one has 8
    and 4 GPUs of two nodes and the next has 4 and 8, so 4 are sure to lie together.

    Example:
        >>> gpus_together(12, 8), gpus_together(3, 8), gpus_together(4, 8)
        (4, 1, 4)
    """
    return math.gcd(degree, gpus_per_node)


def parse_cluster(text: str, host_gib: float | None = None) -> Cluster:
    """`4xH200`, or `H200` for one. Raises ValueError for anything else.

    Example:
        >>> parse_cluster("8xh100").num_gpus
        8
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z]\w*(?:-\w+)?)", text.strip())
    name = match[2].lower() if match else ""
    if match is None or name not in MACHINES:
        known = ", ".join(name.upper() for name in MACHINES)
        near = did_you_mean(name, (kind.upper() for kind in MACHINES))
        raise ValueError(
            f"--gpus {text!r}: write a number and a kind, as 4xH200. Kinds: {known}.{near} For "
            "processes on a CPU nothing is predicted: `longctx patch --gpus 2 --cpu`."
        )
    hardware, count = MACHINES[name], int(match[1] or 1)
    per_node = hardware.gpus_per_node
    if count < 1 or (count > per_node and count % per_node):
        raise ValueError(
            f"--gpus {text!r}: {count} GPUs don't fill machines of {per_node} GPUs each. Use 1 "
            f"to {per_node}, or a multiple of {per_node}."
        )
    if count > MOST_GPUS:
        raise ValueError(
            f"--gpus {text!r}: the planner simulates at most {MOST_GPUS:,}. Use fewer."
        )
    if host_gib is not None and not 0 < host_gib < math.inf:
        raise ValueError(
            f"--host-gib {host_gib}: the memory of a host in GiB. Use a number above 0."
        )
    host_bytes = None if host_gib is None else host_gib * GIB
    return Cluster(hardware=hardware, num_gpus=count, host_bytes=host_bytes)
