"""A step to be saved: the tensors and numbers that a checkpoint is made of, at one moment."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from .state import TrainState


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is written. It shares the tensors with the training, or has copies on the host."""

    step: int
    tensors: dict[str, Any]
    """Trained weights and the optimizer's states; each rank has its own parts."""
    random: dict[str, Tensor]
    """The states of this rank's random generators."""
    scheduler: str
    """JSON."""
    history: dict[str, Any]


def shared_snapshot(state: TrainState) -> Snapshot:
    """The state as it is now, without copies of its tensors: to be written before the next step."""
    return Snapshot(
        step=state.step,
        tensors=tensors_of(state),
        random=_random_states(),
        scheduler=json.dumps(state.scheduler.state_dict()),
        history=dataclasses.asdict(state.history),
    )


def tensors_of(state: TrainState) -> dict[str, Any]:
    """Trained weights and the optimizer's states, as torch's distributed checkpoints take them."""
    options = StateDictOptions(ignore_frozen_params=True)
    optimizer = get_optimizer_state_dict(state.model, plain(state.optimizer), options=options)
    weights = get_model_state_dict(state.model, options=options)
    return {"model": without_frozen(weights, state.model), "optimizer": optimizer}


def without_frozen(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Drop the scales that frozen quantised weights keep under their names."""
    parameters = model.named_parameters()
    frozen = tuple(f"{n.removeprefix('module.')}." for n, p in parameters if not p.requires_grad)
    return {name: value for name, value in weights.items() if not name.startswith(frozen)}


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def random_file(rank: int) -> str:
    """The file with the states of a rank's random generators."""
    return f"random_{rank}.safetensors"


def _random_states() -> dict[str, Tensor]:
    states = torch.cuda.get_rng_state_all()
    on_gpus = {f"cuda_{number}": state for number, state in enumerate(states)}
    return {"cpu": torch.get_rng_state(), **on_gpus}
