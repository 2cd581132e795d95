"""One way to train a model on a cluster, with everything decided."""

from dataclasses import dataclass
from typing import Literal

from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.recurrence import RecurrencePrediction
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
        """How many rows are trained at once if `degree` GPUs share each."""
        return self.cluster.num_gpus // degree

    def rows(self, degree: int) -> int:
        """How many rows a step has."""
        return self.rows_per_step or self.replicas(degree)

    def divides(self, degree: int) -> bool:
        """Whether the rows of a step are a whole number of forwards for every GPU."""
        return self.rows(degree) % self.replicas(degree) == 0

    def forwards(self, degree: int) -> int:
        """How many rows each group of `degree` GPUs trains in a step, one after the other.

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
        frozen -= self.shape.head_weights if self.lora and self.trains_head else 0
        return flops - 2.0 * frozen * self.seq_len

    @property
    def trained_weights(self) -> int:
        """How many weights are trained: under LoRA two factors beside each linear weight."""
        if not self.lora:
            return self.shape.num_weights
        trained = self.lora_rank * self.shape.linear_sides
        trained += self.shape.head_weights if "embeddings" in self.also_train else 0
        return trained + (self.shape.norm_weights if "norms" in self.also_train else 0)

    @property
    def trains_head(self) -> bool:
        """Whether the head's weights are trained, be it as those of tied embeddings."""
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
    """How attention and recurrences run, and what is kept, recomputed and moved to the host."""

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
