"""A training run to compare with its prediction, written as a line of text."""

from dataclasses import dataclass

from config_text import NAMES, options_of
from model_shapes import model_config

from longctx_patch import LongContextConfig
from longctx_patch.choose.search import Result, result_of, usual_tiles
from longctx_patch.memory.policies import LayerPolicy
from longctx_patch.predict.run.candidate import Job, WeightsDtype
from longctx_patch.predict.run.cluster import parse_cluster
from longctx_patch.predict.run.shape import shape_of


@dataclass(frozen=True)
class Run:
    """A model, its config and what is measured; `text` is how it was written."""

    text: str
    model: str
    config: LongContextConfig
    tokens: int
    layers: int | None = None
    lora: bool = False
    rank: int = 16
    dtype: WeightsDtype = "bfloat16"
    fused: bool = True
    rehearse: bool = True
    steps: int = 3
    warm_ups: int = 2

    @classmethod
    def parse(cls, text: str) -> "Run":
        model, _, rest = text.partition(":")
        options = {NAMES.get(name, name): value for name, value in options_of(rest).items()}
        known = cls.__annotations__.keys() - {"text", "model", "config"}
        mine = {name: options.pop(name) for name in list(options) if name in known}
        try:
            return cls(text, model, LongContextConfig(**options), **mine)
        except TypeError as error:
            raise ValueError(
                f"{text}: {error}. Options are {', '.join(sorted(known))}, and fields of "
                "LongContextConfig."
            ) from error

    def predicted(
        self,
        gpus: str,
        *,
        fsdp: bool = True,
        offload_states: bool = False,
        clips: bool = False,
        policies: tuple[LayerPolicy, ...] | None = None,
    ) -> Result:
        """What the run takes on GPUs written as `4xH200`; `policies` are those that layers had."""
        job = Job(
            shape=shape_of(model_config(self.model, self.layers, self.tokens), self.model),
            cluster=parse_cluster(gpus),
            seq_len=self.tokens,
            lora=self.lora,
            lora_rank=self.rank,
            dtype=self.dtype,
            fused_layers=self.fused,
            fsdp=fsdp,
            clips=clips,
        )
        return result_of(
            job,
            ulysses=self.config.ulysses_degree,
            ring=self.config.ring_degree,
            checkpoint=self.config.checkpoint,
            attention_kept=self.config.attention_kept,
            offload_states=offload_states,
            mlp_tiles=self.config.mlp_tiles or usual_tiles(job, self.config.sequence_degree),
            policies=policies,
        )
