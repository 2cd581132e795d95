"""Accelerate's own context parallelism (torch's, over FSDP2), and TRL's settings on top of it.

Options: `rotation` (allgather, alltoall); `checkpoint` (full: Accelerate's, every layer; offload:
transformers', layer inputs on the host; none); `loss` (logits; trl: the head of TRL's SFTTrainer,
which computes it in tiles); `liger`. TRL's long-context recipe is `loss=trl,checkpoint=offload`;
its trainer also gathers metrics, which is left out here. CUDA only, as torch's ring is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from systems import Job, NotCovered, TorchTrained, make_optimizer, mean_loss, next_tokens, take
from systems.model import checkpoint_layers, use_options


def build(job: Job, model: PreTrainedModel, options: dict[str, Any]) -> "AccelerateContextParallel":
    if not job.shards_weights:
        raise NotCovered("context parallelism needs FSDP2: two GPUs or more")
    chosen = take(
        options,
        rotation=("allgather", "alltoall"),
        checkpoint=("full", "offload", "none"),
        loss=("logits", "trl"),
        liger=(False, True),
    )
    return AccelerateContextParallel(job, model, chosen)


class AccelerateContextParallel(TorchTrained):
    def __init__(self, job: Job, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self._num_ranks = job.num_ranks
        self._tiled_loss = options["loss"] == "trl"
        use_options(model, options["loss"], liger=options["liger"])
        if options["checkpoint"] == "offload":
            checkpoint_layers(model, offload=True)
        self._accelerator = make_accelerator(
            job, options["rotation"], checkpointed=options["checkpoint"] == "full"
        )
        optimizer = make_optimizer(model.parameters(), job.device)
        self.model, self.optimizer = self._accelerator.prepare(model, optimizer)

    def loss(self) -> Tensor:
        """Open the context that `backward` closes, since attention has to be replaced in both."""
        ids, labels = self._row.clone(), next_tokens(self._row)
        num_tokens = ids.shape[1]
        positions = torch.arange(num_tokens, device=ids.device)[None]
        self._context = self._cut(ids, labels, positions)
        self._context.__enter__()
        if not self._tiled_loss:
            logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
            return mean_loss(logits, labels, num_tokens, self._num_ranks)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=num_tokens - 1,
            fused_lm_head=True,
        )
        return output.loss * self._num_ranks

    @contextmanager
    def _cut(self, *whole: Tensor) -> Iterator[None]:
        """Cut tensors `[1, N]` in place; they stay cut."""
        with self._accelerator.maybe_context_parallel(
            buffers=list(whole), buffer_seq_dims=[1] * len(whole), no_restore_buffers=set(whole)
        ):
            yield

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._context.__exit__(None, None, None)


def make_accelerator(job: Job, rotation: str, *, checkpointed: bool) -> Any:
    """An Accelerator as the documentation of its context parallelism sets it up."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    return Accelerator(
        mixed_precision=job.precision,
        parallelism_config=ParallelismConfig(
            cp_size=job.num_ranks,
            cp_handler=TorchContextParallelConfig(cp_comm_strategy=rotation),
        ),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            activation_checkpointing=checkpointed,
        ),
    )
