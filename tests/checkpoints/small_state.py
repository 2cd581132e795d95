"""A tiny Llama in training, without a trainer around it, and what saves it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, LlamaConfig, get_scheduler, set_seed

from longctx_patch.checkpoints.background import BesideTraining, whole_bytes
from longctx_patch.checkpoints.manifest import begin, seal
from longctx_patch.checkpoints.states import (
    load_tensors,
    read_whole_weights,
    tensors_of,
    write_states,
)
from longctx_patch.recipes.exporting import write_model
from longctx_patch.recipes.models import byte_tokenizer
from longctx_patch.rules.together import of_all_ranks, own_rank
from longctx_patch.trainer.saved_states import STATES
from tests.tiny_llama import TINY_LLAMA


@dataclass
class TrainState:
    """What is trained, and how far it is."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0


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


class Saver(BesideTraining):
    """Saves states beside the training, as trainers do."""

    def __init__(self, folder: Path, before_model: Callable[[], object] = int, **how: Any) -> None:
        """`before_model`: is called before weights are written as plain libraries load them."""
        usual: dict[str, Any] = {"device_type": "cpu", "timeout_s": 60.0, "say": print}
        super().__init__(**usual | how)
        self._folder, self._before_model = folder, before_model

    def save(self, state: TrainState) -> Path:
        with self._waiting():
            folder = self._folder / f"checkpoint-{state.step}"
            if own_rank() == 0:
                begin(folder)
                torch.save([state.step, state.scheduler.state_dict()], folder / "rest.pt")
            of_all_ranks(None)
            tensors = tensors_of(state.model, state.optimizer)
            copies = self.copied(tensors, whole_bytes(tensors["model"]) if own_rank() == 0 else 0)
            write = partial(self._write, state.model, copies or tensors, folder)
            write() if copies is None else self.start(folder.name, write)
        return folder

    def _write(
        self, model: Any, tensors: Any, folder: Path, group: ProcessGroup | None = None
    ) -> None:
        write_states(tensors, folder / STATES, group)
        if own_rank() == 0:
            self._before_model()
            weights = read_whole_weights(tensors["model"], folder / STATES, {})
            write_model(model, byte_tokenizer(), folder, weights, seed=0)
        seal(folder, group)


def load(state: TrainState, folder: Path) -> None:
    """Bring a state to where it was saved."""
    load_tensors(state.model, state.optimizer, folder / STATES)
    state.step, schedule = torch.load(folder / "rest.pt", weights_only=True)
    state.scheduler.load_state_dict(schedule)
