"""DeepSpeed ALST through Accelerate: Ulysses sequence parallelism and ZeRO-3.

Options: `checkpoint` (full, none); `loss` (logits; liger: Liger Kernel's fused one, as in ALST's
recipes; trl: the head of TRL's SFTTrainer); `liger`.
"""

import os
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from systems import (
    LEARNING_RATE,
    Job,
    NotCovered,
    TorchTrained,
    mean_loss,
    next_tokens,
    parameter,
    take,
)
from systems.model import checkpoint_layers, use_options


def build(job: Job, model: PreTrainedModel, options: dict[str, Any]) -> "Alst":
    if job.num_ranks == 1:
        raise NotCovered("it shares a sequence between two GPUs or more")
    chosen = take(
        options,
        checkpoint=("full", "none"),
        loss=("logits", "liger", "trl"),
        liger=(False, True),
    )
    return Alst(job, model, chosen)


class Alst(TorchTrained):
    model: Any

    def __init__(self, job: Job, model: PreTrainedModel, options: dict[str, Any]) -> None:
        # None of DeepSpeed's ops is compiled here, so the toolkit's version doesn't matter.
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        self._job, self._loss_kind = job, options["loss"]
        use_options(model, self._loss_kind, liger=options["liger"])
        if options["checkpoint"] == "full":
            checkpoint_layers(model)
        self._accelerator = make_accelerator(job)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.model, self.optimizer = self._accelerator.prepare(model, optimizer)

    def load(self, row: Tensor) -> None:
        """Keep what DeepSpeed's data loader adapter yields: one run of tokens for each rank."""
        self._num_tokens = row.shape[1]
        length = self._num_tokens // self._job.num_ranks
        mine = slice(self._job.rank * length, (self._job.rank + 1) * length)
        self._ids, self._labels = row[:, mine].clone(), next_tokens(row)[:, mine].clone()
        self._positions = torch.arange(self._num_tokens, device=row.device)[None, mine]

    def loss(self) -> Tensor:
        inputs = {"input_ids": self._ids, "position_ids": self._positions, "use_cache": False}
        if self._loss_kind == "logits":
            logits = self.model(**inputs).logits
            return mean_loss(logits, self._labels, self._num_tokens, self._job.num_ranks)
        if self._loss_kind == "trl":
            inputs |= {"fused_lm_head": True}
        output = self.model(
            **inputs,
            labels=self._labels,
            shift_labels=self._labels,
            num_items_in_batch=self._num_tokens - 1,
        )
        return output.loss * self._job.num_ranks

    def backward(self, loss: Tensor) -> None:
        # accelerator.backward would also step the optimizer, and gradients would be gone.
        self.model.backward(loss)

    def gradient_norm(self, name: str) -> float:
        from deepspeed.utils import safe_get_full_grad

        return float(safe_get_full_grad(parameter(self.model, name)).float().norm())

    def update(self) -> None:
        self.model.step()


def make_accelerator(job: Job) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    sequence = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    settings = {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e5,
        },
        "bf16": {"enabled": job.device.type == "cuda"},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "seq_parallel_communication_data_type": "bf16" if job.device.type == "cuda" else "fp32",
    }
    return Accelerator(
        parallelism_config=ParallelismConfig(
            sp_backend="deepspeed", sp_size=job.num_ranks, dp_shard_size=1, sp_handler=sequence
        ),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
    )
