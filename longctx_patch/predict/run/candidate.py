"""One way to train a model on a cluster, with everything decided."""

from dataclasses import dataclass
from typing import Literal

from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.run.cluster import Cluster
from longctx_patch.predict.run.shape import ModelShape

WeightsDtype = Literal["bfloat16", "float32", "nf4"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what."""

    shape: ModelShape
    cluster: Cluster
    seq_len: int
    lora: bool = False
    """Whether an adapter over a frozen model is trained, in place of every weight."""
    lora_rank: int = 16
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

    def __post_init__(self) -> None:
        if self.dtype == "nf4" and (self.fsdp or not self.lora):
            raise ValueError(
                "dtype='nf4' is for the frozen weights of an adapter, which FSDP2 does not shard. "
                "Use lora=True and fsdp=False."
            )

    @property
    def workload(self) -> Workload:
        """The attention of one layer and one row, every token of which sees all before it."""
        shape = self.shape
        return Workload(
            num_tokens=self.seq_len,
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
        frozen = self.shape.linear_weights if self.lora else 0
        return flops - 2.0 * frozen * self.seq_len

    @property
    def trained_weights(self) -> int:
        """How many weights are trained: under LoRA two factors beside each linear weight."""
        if not self.lora:
            return self.shape.num_weights
        return self.lora_rank * self.shape.linear_sides * self.shape.num_layers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """How attention runs, and what is kept, recomputed and moved to the host."""

    setting: Setting
    """Degrees, plans and waves."""
    checkpoint: str
    """The policy that the config names: none, attention, offload, full or auto."""
    policies: tuple[LayerPolicy, ...]
    """The policy of each layer, first to last."""
    mlp_tiles: int = 1
    attention_kept: float = 1.0
    """Share of the tokens whose attention layers keep."""
    offload_states: bool = False
    """Whether FSDP2 keeps weights, gradients and the optimizer on the host, and steps there."""

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
