"""Writing a checkpoint: a folder that is complete once its manifest is there."""

import contextlib
import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from longctx_patch.checkpoints.manifest import seal
from longctx_patch.plugin.together import num_ranks, of_all_ranks, own_rank

from .state import TrainState

RUN_FILE = "run.json"
SCHEDULER_FILE = "scheduler.json"
WRITERS = 4
"""Threads with which each process writes states: 2 GiB took 0.9 s with four, 3.7 s with one."""


def save_checkpoint(
    state: TrainState,
    folder: Path,
    run: Mapping[str, Any],
    export: Callable[[Path], None],
) -> None:
    """Write a checkpoint into `folder`, in place of what is there; every process calls this.

    Args:
        state: what is saved.
        folder: of this checkpoint alone.
        run: the fingerprint that a run which goes on must have.
        export: writes the model as plain libraries load it; collective.
    """
    is_main = own_rank() == 0
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # left incomplete by a run that was stopped
        folder.mkdir(parents=True)
    of_all_ranks(None)
    export(folder / "model")
    with one_process_is_fine():
        writer = Writer(folder / "state", thread_count=WRITERS)
        dcp.save(tensors_of(state), storage_writer=writer, no_dist=num_ranks() == 1)
    save_file(_random_states(), folder / random_file(own_rank()))
    if is_main:
        schedule = json.dumps(state.scheduler.state_dict())
        (folder / SCHEDULER_FILE).write_text(schedule, encoding="utf-8")
        write_run(folder, state.step, run, history=dataclasses.asdict(state.history))
    seal(folder)


def write_run(folder: Path, step: int, run: Mapping[str, Any], **more: Any) -> None:
    """Write `run.json`: the step, the run's fingerprint, and `more`."""
    said = {"step": step, **more, "fingerprint": run}
    content = json.dumps(said, indent=2, allow_nan=False)
    (folder / RUN_FILE).write_text(content, encoding="utf-8")


class Writer(dcp.FileSystemWriter):
    """torch's writer, but errors of its threads are raised; else a full disk would go unnoticed."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        done = super().write_data(plan, planner)
        if len(done.value()) != len(plan.items):
            raise OSError(f"states could not be written to {self.path}: see the output above")
        return done


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


def _random_states() -> dict[str, torch.Tensor]:
    states = torch.cuda.get_rng_state_all()
    on_gpus = {f"cuda_{number}": state for number, state in enumerate(states)}
    return {"cpu": torch.get_rng_state(), **on_gpus}


@contextlib.contextmanager
def one_process_is_fine() -> Iterator[None]:
    """Silence torch's warning of a single process, which `no_dist` already announces."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield
