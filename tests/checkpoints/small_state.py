"""A tiny Llama in training, without the recipe around it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler, set_seed

from longctx_patch.checkpoints.keeper import Keeper
from longctx_patch.checkpoints.series import Retention, steps_of
from longctx_patch.checkpoints.train_state import TrainState
from tests.tiny_llama import TINY_LLAMA


def tiny_model(**changes: Any) -> Any:
    """Freshly initialised, the same each time."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**TINY_LLAMA, **changes))


def state_of(model: Any) -> TrainState:
    """The state before the first step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=9)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler)


def train(state: TrainState) -> float:
    """One step on rows of its own; returns the loss."""
    ids = torch.arange(40).view(2, 20) + state.step
    loss = state.model(input_ids=ids, labels=ids).loss
    loss.backward()
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    return float(loss.detach())


def keeper_of(folder: Path, write_model: Any, **changes: Any) -> Keeper:
    """Returns a keeper without a fingerprint, which keeps all checkpoints and writes beside."""
    given: dict[str, Any] = {"series": steps_of(folder), "run": {}, "write_model": write_model}
    given |= {"retention": Retention(), "device": torch.device("cpu"), "in_background": True}
    return Keeper(**given | {"timeout_s": 60.0, "say": print} | changes)
