"""A job to train on a cluster, and one way to train it with everything decided."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.planner.attention_cost import Workload
from longctx_patch.planner.machines import GIB, MACHINES, Hardware
from longctx_patch.planner.model_shape import ModelShape
from longctx_patch.planner.recurrent_cost import RecurrencePrediction
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.sequence.documents import Documents


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Named parts that add up to a total."""

    def parts(self) -> dict[str, float]:
        """Each part by its name."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts().values())


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
        """Says whether groups of `degree` consecutive GPUs lie in one node or fill nodes."""
        return gpus_together(degree, self.gpus_per_node) in (degree, self.gpus_per_node)

    def seen_by(self, degree: int) -> Hardware:
        """The machine, with as many GPUs in a node as a group of `degree` surely has together."""
        together = gpus_together(degree, self.gpus_per_node)
        return replace(self.hardware, gpus_per_node=together)

    def __str__(self) -> str:
        return f"{self.num_gpus}x{self.hardware.name.upper()}"


def gpus_together(degree: int, gpus_per_node: int) -> int:
    """Counts how many consecutive GPUs of every group of `degree` lie within one node.

    Groups that don't fill nodes lie across their borders: of groups of 12 in nodes of 8, one has 8
    and 4 GPUs of two nodes and the next has 4 and 8, so 4 are sure to lie together.

    Example:
        >>> gpus_together(12, 8), gpus_together(3, 8), gpus_together(4, 8)
        (4, 1, 4)
    """
    return math.gcd(degree, gpus_per_node)


_ALSO = {"a100-80": "a100", "h100-80": "h100"}
"""Other names of kinds."""


def parse_cluster(text: str, host_gib: float | None = None) -> Cluster:
    """`4xH200`, or `H200` for one. Raises ValueError for anything else.

    Example:
        >>> parse_cluster("8xh100").num_gpus
        8
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z]\w*(?:-\w+)?)", text.strip())
    name = match[2].lower() if match else ""
    name = _ALSO.get(name, name)
    if match is None or name not in MACHINES:
        known = ", ".join(name.upper() for name in MACHINES)
        raise ValueError(
            f"--gpus {text!r}: write a number and a kind, as 4xH200. Kinds: {known}. Plan "
            "another card as the one that has its memory; its times differ. For processes on a CPU "
            "nothing is predicted: `longctx patch --gpus 2 --cpu`."
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


WeightsDtype = Literal["bfloat16", "float32", "nf4"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says what is to be trained, and on what."""

    shape: ModelShape
    cluster: Cluster
    seq_len: int
    row: Documents | None = None
    """The documents of a row; None: it is one."""
    lora: bool = False
    """Whether an adapter over a frozen model is trained, in place of every weight."""
    lora_rank: int = 16
    also_train: tuple[str, ...] = ()
    """`embeddings` and `norms` that are trained as a whole beside an adapter, as copies in
    float32."""
    dtype: WeightsDtype = "bfloat16"
    """The dtype that weights are loaded in; all compute in bfloat16. FSDP2 makes trained weights
    float32. `nf4` is for the frozen weights of linear layers under an adapter."""
    fsdp: bool = True
    """Whether FSDP2 shards the model. If not, each process has a whole copy and trains it as it was
    loaded, under autocast."""
    fused_layers: bool = True
    """Whether norms, rotary embeddings and SwiGLU are Liger Kernel's, which recipes take where it
    is installed."""
    clips: bool = True
    """Whether gradients are clipped to a norm, as in the recipe; on the host this takes time."""
    rows_per_step: int | None = None
    """Rows of an optimizer step, over all GPUs; None: as many as are trained at once."""

    def __post_init__(self) -> None:
        if self.rows_per_step is not None and self.rows_per_step < 1:
            raise ValueError(f"rows_per_step={self.rows_per_step}: it must be 1 or more.")
        if self.dtype == "nf4" and (self.fsdp or not self.lora):
            raise ValueError(
                "dtype='nf4' is for the frozen weights of an adapter, which FSDP2 does not shard. "
                "Use lora=True and fsdp=False."
            )

    def replicas(self, degree: int) -> int:
        """Counts how many rows are trained at once if `degree` GPUs share each."""
        return self.cluster.num_gpus // degree

    def rows(self, degree: int) -> int:
        """Counts how many rows a step has."""
        return self.rows_per_step or self.replicas(degree)

    def divides(self, degree: int) -> bool:
        """Says whether the rows of a step are a whole number of forwards for every GPU."""
        return self.rows(degree) % self.replicas(degree) == 0

    def forwards(self, degree: int) -> int:
        """Counts how many rows each group of `degree` GPUs trains in a step, one after the other.

        Raises ValueError if some groups would have more rows than others.
        """
        rows, at_once = self.rows(degree), self.replicas(degree)
        if rows % at_once:
            raise ValueError(
                f"rows_per_step={rows} with {at_once} rows at once: it must be a multiple, since a "
                f"step of other rows has other gradients. Use {nearest_multiples(rows, at_once)}."
            )
        return rows // at_once

    @property
    def workload(self) -> Workload:
        """The attention of one layer and one row."""
        shape, row = self.shape, self.row
        return Workload(
            num_tokens=self.seq_len,
            lengths=() if row is None else row.lengths,
            parents=() if row is None else row.parents,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )

    @property
    def num_shards(self) -> int:
        """GPUs that share weights, gradients and optimizer."""
        return self.cluster.num_gpus if self.fsdp else 1

    @property
    def step_flops(self) -> float:
        """FLOPs of a row, forward and backward, without recompute and frozen weights' gradients."""
        flops = self.shape.step_flops(self.seq_len)
        frozen = self.shape.active_weights if self.lora else 0
        frozen -= self.shape.head_weights if self.lora and self.trains_head else 0
        return flops - 2.0 * frozen * self.seq_len

    @property
    def trained_weights(self) -> int:
        """Counts how many weights are trained: under LoRA two factors beside each linear weight."""
        if not self.lora:
            return self.shape.num_weights
        trained = self.lora_rank * self.shape.linear_sides
        trained += self.shape.head_weights if "embeddings" in self.also_train else 0
        return trained + (self.shape.norm_weights if "norms" in self.also_train else 0)

    @property
    def trains_head(self) -> bool:
        """Says whether the head's weights are trained, be it as those of tied embeddings."""
        return not self.lora or ("embeddings" in self.also_train and self.shape.is_tied)


def nearest_multiples(number: int, factor: int) -> str:
    """The multiples of `factor` next to a number that is none, in words.

    Example:
        >>> nearest_multiples(10, 4)
        '8 or 12'
    """
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Says how attention and recurrences run, and what is kept, recomputed or moved to the host."""

    setting: Setting
    """Degrees and plans."""
    checkpoint: str
    """The policy that the config names: none, attention, offload, full or auto."""
    policies: tuple[LayerPolicy, ...]
    """The policy of each layer, first to last."""
    mlp_tiles: int = 1
    attention_kept: float = 1.0
    """Share of the tokens whose attention layers keep."""
    offload_states: bool = False
    """Whether FSDP2 keeps weights, gradients and the optimizer on the host, and steps there."""
    recurrence: RecurrencePrediction | None = None
    """How the recurrence of a recurrent layer runs, and what it takes; None: no layer has one."""

    @property
    def ulysses(self) -> int:
        return self.setting.ulysses_degree

    @property
    def ring(self) -> int:
        return self.setting.ring_degree

    @property
    def sequence_degree(self) -> int:
        """GPUs that share a row."""
        return self.ulysses * self.ring

    @property
    def plan(self) -> str:
        """The name of the plan of forward."""
        return self.setting.name(Direction.FORWARD)
