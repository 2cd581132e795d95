"""Reading a checkpoint back. `choosing` has checked it before: nothing here looks for damage."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from longctx_patch.checkpoints.plain_pickle import load_plain
from longctx_patch.health.finite import StepHistory
from longctx_patch.plugin.together import own_rank

from .snapshot import plain, random_file, tensors_of
from .state import TrainState
from .writing import RUN_FILE, SCHEDULER_FILE


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Bring `state` to where `folder` was saved; every process calls this."""
    content = tensors_of(state)
    load_plain(content, folder / "state")
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(state.model, content["model"], options=options)
    set_optimizer_state_dict(
        state.model, plain(state.optimizer), content["optimizer"], options=options
    )
    state.scheduler.load_state_dict(_json(folder / SCHEDULER_FILE))
    random = folder / random_file(own_rank())
    if random.exists():  # there are fewer where the run had fewer processes
        _set_random_states(load_file(random))
    run = _json(folder / RUN_FILE)
    state.step = run["step"]
    state.history = StepHistory(num_skipped=run.get("history", {}).get("num_skipped", 0))


def step_of(folder: Path) -> int:
    """The steps that are done in a checkpoint."""
    found: int = _json(folder / RUN_FILE)["step"]
    return found


def fingerprint_of(folder: Path) -> dict[str, Any]:
    """The fingerprint of the run that wrote a checkpoint."""
    found: dict[str, Any] = _json(folder / RUN_FILE)["fingerprint"]
    return found


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states.pop("cpu"))
    if states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([states[f"cuda_{n}"] for n in range(len(states))])


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
