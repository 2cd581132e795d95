"""What a checkpoint has of a training: weights and states by name, taken from a model and its
optimizer and loaded back. `series` has checked a folder before: nothing here looks for damage."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from longctx_patch.health.finite import torch_optimizer

from .plain_pickle import MetadataReader, load_plain

RUN_FILE = "run.json"


def write_run(folder: Path, step: int, run: Mapping[str, Any]) -> None:
    """Write `run.json`: the step, and the run's fingerprint."""
    said = {"step": step, "fingerprint": run}
    content = json.dumps(said, indent=2, allow_nan=False)
    (folder / RUN_FILE).write_text(content, encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """What `write_run` has written."""
    found: dict[str, Any] = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    return found


def tensors_of(model: Any, optimizer: Any, *, frozen: bool = False) -> dict[str, Any]:
    """Weights and the optimizer's states by name, as torch's distributed checkpoints take them: so
    one holds for DDP, FSDP2 and any number of processes. `frozen`: frozen weights as well."""
    options = StateDictOptions(ignore_frozen_params=not frozen)
    states = get_optimizer_state_dict(model, torch_optimizer(optimizer), options=options)
    return {"model": weights_of(model, frozen=frozen), "optimizer": states}


def weights_of(model: Any, *, frozen: bool = False, whole: bool = False) -> dict[str, Any]:
    """Weights by name; `whole`: those of all ranks, on the host of rank 0, which all ranks ask."""
    options = StateDictOptions(
        full_state_dict=whole, cpu_offload=whole, ignore_frozen_params=not frozen
    )
    weights = get_model_state_dict(model, options=options)
    return weights if frozen else without_frozen(weights, model)


def load_tensors(model: Any, optimizer: Any, states: Path, *, frozen: bool = False) -> None:
    """Load what `tensors_of` gave from the folder in which it was written; every process calls
    this."""
    content = tensors_of(model, optimizer, frozen=frozen)
    _leave_out_unsaved(content["optimizer"]["state"], states)
    load_plain(content, states)
    options = StateDictOptions(ignore_frozen_params=not frozen, strict=False)
    set_model_state_dict(model, content["model"], options=options)
    set_optimizer_state_dict(
        model, torch_optimizer(optimizer), content["optimizer"], options=options
    )


def load_weights(model: Any, states: Path, *, frozen: bool = False) -> None:
    """Load the weights alone; every process calls this."""
    content = {"model": weights_of(model, frozen=frozen)}
    load_plain(content, states)
    options = StateDictOptions(ignore_frozen_params=not frozen, strict=False)
    set_model_state_dict(model, content["model"], options=options)


def read_whole_weights(
    like: Mapping[str, Tensor], states: Path, tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """The weights of all ranks, on the host of this one, from what they have written. `tied`: names
    of a weight that another one is too, by which it is one tensor."""
    weights = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in like.items()}
    load_plain({"model": weights}, states, alone=True)
    return weights | {name: weights[of] for name, of in tied.items() if {name, of} <= {*weights}}


def _leave_out_unsaved(states: dict[str, Any], folder: Path) -> None:
    """Leave out states that were not saved, of weights that no step has reached, such as those of
    an expert: torch makes them for all weights."""
    saved = MetadataReader(folder).read_metadata().state_dict_metadata
    for name in [*states]:
        if not any(f"optimizer.state.{name}.{kind}" in saved for kind in states[name]):
            del states[name]


def without_frozen(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Drop the scales that frozen quantised weights keep under their names."""
    parameters = model.named_parameters()
    frozen = tuple(f"{n.removeprefix('module.')}." for n, p in parameters if not p.requires_grad)
    return {name: value for name, value in weights.items() if not name.startswith(frozen)}
