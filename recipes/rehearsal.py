"""Finds out before the first step whether a step fits."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from longctx_patch.hf.preflight import preflight
from longctx_patch.loss.law import count_valid_tokens
from longctx_patch.plugin import states_on_host
from longctx_patch.recipes.run_batches import Data, micro_batches
from longctx_patch.recipes.stages import Stages

Loss = Callable[[], torch.Tensor]


class MemoryCallback(TrainerCallback):
    """Rehearses a step before the first one, and keeps room on the host for what the optimizer will
    have there."""

    def __init__(self, trainer: Any, stages: Stages, rehearse: Callable[[], None] | None) -> None:
        """`rehearse`: does so with the longest rows, which may come late; None: nothing does."""
        self._trainer, self._stages, self._rehearse = trainer, stages, rehearse

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        if states_on_host(trainer.accelerator):
            trainer.long_context_handle.reserve_host(states_to_come(trainer))
        if self._rehearse is not None:
            self._stages.enter("rehearsal")
            self._rehearse()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.long_context_handle.reserve_host(0)  # the optimizer has made its states


def check_memory(trainer: Any, data: Data) -> None:
    """Rehearse a step of the longest rows that are still to come, so that no later stage is out of
    memory."""
    done, device = trainer.state.global_step, trainer.accelerator.device
    stage = data.longest(done)
    step = max(done, stage.of.first)
    batch = next(micro_batches(data, range(step, step + 1)))
    batch = {name: value.to(device) for name, value in batch.items()}
    tokens = count_valid_tokens([batch])

    def loss() -> torch.Tensor:
        model = trainer.model_wrapped
        shard: torch.Tensor = model(**batch, num_valid_tokens=tokens, use_cache=False).loss
        return shard

    rehearse(trainer, loss, stage.order.accumulation)


def rehearse(trainer: Any, loss: Loss, forwards: int, rows: str = "") -> None:
    """Rehearse a step of so many forwards with three layers on a GPU, and print the memory that is
    predicted for all layers with these `rows`. Raises WillNotFit."""
    accelerator = trainer.accelerator
    with trainer._gradients_stay_local(trainer.model_wrapped):
        found = preflight(
            trainer.long_context_handle,
            loss,
            accelerator.backward,
            has_optimizer_states=bool(trainer.optimizer.state),
            num_forwards=forwards,
        )
    if found is not None:
        accelerator.print(f"memory: {rows}{found}")


def states_to_come(trainer: Any) -> int:
    """Bytes of this process's gradients and of AdamW's two states, before the first step."""
    if trainer.optimizer.state:
        return 0
    trained = [p for p in trainer.model_wrapped.parameters() if p.requires_grad]
    return 3 * sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in trained)
