"""A model patched by this project, under FSDP2 as its run folders set it up.

Options: fields of LongContextConfig (`ulysses` and `ring` for the degrees), and `layers` (none,
liger, compile): what computes RMSNorm, SwiGLU and rotary embeddings; `reshard=false` keeps weights
whole between forward and backward; `rows=true` gives the model whole rows, which it cuts in each
step, in place of a shard that was cut before; `weights=bfloat16` keeps weights and the optimizer's
states in bfloat16, as a run on one GPU does, in place of float32; `lora=true` trains an adapter.
Where fewer ranks share a row than there are, each group of them has the same row; `shards` says
which GPUs share weights: all (FSDP2), those of a row (HSDP), or none (DDP).
"""

import dataclasses
import os
from typing import Any

import yaml
from config_text import NAMES
from torch import Tensor
from transformers import PreTrainedModel

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.memory.policies import POLICIES
from longctx_patch.plugin import accelerate_yaml, close_accelerator, make_accelerator
from systems import Job, TorchTrained, make_optimizer, take

SHARDS = ("all", "row", "none")
LORA_RANK = 16
WEIGHTS = ("float32", "bfloat16")
"""What weights are kept in where they are sharded; they are used in bfloat16."""


def build(job: Job, model: PreTrainedModel, options: dict[str, Any]) -> "Ours":
    return Ours(job, model, dict(options))


class Ours(TorchTrained):
    def __init__(self, job: Job, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self._device = job.device
        self._gives_whole_rows = options.pop("rows", False)
        layers, reshards = options.pop("layers", "none"), options.pop("reshard", True)
        weights = take({"weights": options.pop("weights", "float32")}, weights=WEIGHTS)["weights"]
        if weights == "bfloat16" and not job.shards_weights:
            raise ValueError("weights=bfloat16: weights that are not sharded keep their dtype.")
        shards = take({"shards": options.pop("shards", "all")}, shards=SHARDS)["shards"]
        is_sharded = job.shards_weights and shards != "none"
        self.learns_all = not options.pop("lora", False)
        config = LongContextConfig(**{NAMES.get(key, key): x for key, x in options.items()})
        # Such a policy measures in the first steps, and decides after them.
        self.warm_up_steps = 4 if POLICIES[config.checkpoint].chooses_by_layer else 2
        self.rows_at_once, left = divmod(job.num_ranks, config.sequence_degree)
        if left:
            raise ValueError(
                f"{config.sequence_degree} ranks share a sequence, and {job.num_ranks} run: give "
                "ulysses= and ring= that multiply to a part of it."
            )
        if is_sharded:
            os.environ.update(launch_environment(job.num_ranks, reshards))
        self._accelerator = make_accelerator(
            config,
            dp_replicate_size=self.rows_at_once if is_sharded and shards == "row" else None,
            mixed_precision="no" if weights == "bfloat16" else self._precision(job),
            cpu=job.device.type == "cpu",
        )
        fuse_layers(model, layers)
        if not self.learns_all:
            model = with_adapter(model)
        self._handle = patch(model, config)
        self._collate = SequenceShardCollator(
            config, group_rank=self._handle.group_rank, pad_token_id=0
        )
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], job.device)
        self.model, self.optimizer = self._accelerator.prepare(model, optimizer)

    def _precision(self, job: Job) -> str:
        """Adapters are float32 beside weights of any dtype."""
        return job.precision if self.learns_all or job.device.type == "cpu" else "bf16"

    def load(self, row: Tensor) -> None:
        if self._gives_whole_rows:
            self._batch = {"input_ids": row, "labels": row}
            return
        batch = self._collate([{"input_ids": row[0].cpu()}])
        self._batch = {name: value.to(self._device) for name, value in batch.items()}

    def loss(self) -> Tensor:
        loss: Tensor = self.model(**self._batch, use_cache=False).loss
        return loss

    def details(self) -> dict[str, Any]:
        found = dataclasses.asdict(self._handle.checkpointing)
        return {"checkpointing": found, "kernels": self._handle.kernels}

    def close(self) -> None:
        close_accelerator(self._accelerator)


def with_adapter(model: PreTrainedModel) -> Any:
    """The model with LoRA on all of its linear layers, as recipes put it there."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))


def launch_environment(
    num_ranks: int, reshards: bool = True, *, states_on_host: bool = False
) -> dict[str, str]:
    """The variables that `accelerate launch` exports for the FSDP2 settings of a run folder, in
    which all ranks share a sequence."""
    text = accelerate_yaml(num_ranks, num_ranks, fsdp=True, states_on_host=states_on_host)
    written = yaml.safe_load(text)
    settings = written["fsdp_config"] | {"fsdp_reshard_after_forward": reshards}
    exported = {key.upper(): str(value) for key, value in settings.items()}
    exported["ACCELERATE_MIXED_PRECISION"] = written["mixed_precision"]
    return {"ACCELERATE_USE_FSDP": "true", **exported}
