"""Whether a step fits, found out before the first one."""

from collections.abc import Callable
from typing import Any

import torch

from longctx_patch import PatchHandle
from longctx_patch.checkpoints.train_state import TrainState
from longctx_patch.hf.preflight import preflight
from longctx_patch.loss.law import count_valid_tokens
from longctx_patch.recipes.run_batches import Data, micro_batches
from longctx_patch.recipes.train_step import gradients_stay_local

Loss = Callable[[], torch.Tensor]


def check_memory(accelerator: Any, state: TrainState, handle: PatchHandle, data: Data) -> None:
    """Rehearse a step of the longest rows that are still to come, so that no later stage is out of
    memory."""
    stage = data.longest(state.step)
    step = max(state.step, stage.of.first)
    batch = next(micro_batches(data, range(step, step + 1)))
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    tokens = count_valid_tokens([batch])

    def loss() -> torch.Tensor:
        shard: torch.Tensor = state.model(**batch, num_valid_tokens=tokens, use_cache=False).loss
        return shard

    rehearse(accelerator, handle, state, loss, stage.order.accumulation)


def rehearse(
    accelerator: Any,
    handle: PatchHandle,
    state: TrainState,
    loss: Loss,
    forwards: int,
    rows: str = "",
) -> None:
    """Rehearse a step of so many forwards with three layers on a GPU, and print the memory that is
    predicted for all layers with these `rows`. Raises WillNotFit."""
    with gradients_stay_local(accelerator, state.model, until_last=True):
        goes_on = bool(state.optimizer.state)
        found = preflight(
            handle,
            loss,
            accelerator.backward,
            has_optimizer_states=goes_on,
            num_forwards=forwards,
        )
    if found is not None:
        accelerator.print(f"memory: {rows}{found}")


def states_to_come(state: TrainState) -> int:
    """Bytes of this process's gradients and of AdamW's two states, before the first step."""
    if state.optimizer.state:
        return 0
    trained = [p for p in state.model.parameters() if p.requires_grad]
    return 3 * sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in trained)
