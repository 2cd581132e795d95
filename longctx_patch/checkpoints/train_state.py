"""A step of a training as a checkpoint has it: taken from a model and its optimizer, written into a
folder, and loaded back. `series` has checked a folder before: nothing here looks for damage."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from longctx_patch.health.finite import StepHistory, torch_optimizer
from longctx_patch.rules.together import of_all_ranks, own_rank

from .manifest import begin, seal
from .plain_pickle import MetadataReader, load_plain
from .series import clear
from .states import write_states

RUN_FILE, SCHEDULER_FILE = "run.json", "scheduler.json"
WriteModel = Callable[[Path, dict[str, Tensor]], object]
"""Writes whole trained weights as plain libraries load them; one process calls it."""


@dataclass(kw_only=True)
class TrainState:
    """What changes while training, beside its data, and has to be restored to go on exactly."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0
    """Optimizer steps done or skipped; with the row order this is also the position in the data."""
    history: StepHistory = field(default_factory=StepHistory)


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
    on_gpus = {f"cuda_{n}": each for n, each in enumerate(torch.cuda.get_rng_state_all())}
    return Snapshot(
        step=state.step,
        tensors=tensors_of(state.model, state.optimizer),
        random={"cpu": torch.get_rng_state(), **on_gpus},
        scheduler=json.dumps(state.scheduler.state_dict()),
        history=asdict(state.history),
    )


def write_checkpoint(
    snapshot: Snapshot,
    folder: Path,
    run: Mapping[str, Any],
    write_model: WriteModel,
    group: ProcessGroup | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Write a checkpoint into `folder`; every process calls this. One that a stopped run has left
    there goes; what is the user's gets another name.

    Args:
        snapshot: what is saved.
        folder: of this checkpoint alone.
        run: the fingerprint that a run which goes on must have.
        write_model: gets the weights that were written, read back: so no device gathers them.
        group: see `of_all_ranks`.
        say: prints for the job.
    """
    is_main, states = own_rank() == 0, folder / "state"
    if is_main:
        clear(folder, say)
        begin(folder)
    of_all_ranks(None, group)
    write_states(snapshot.tensors, states, group)
    save_file(snapshot.random, folder / _random_file(own_rank()))
    if is_main:
        write_model(folder / "model", read_whole_weights(snapshot.tensors["model"], states, {}))
        (folder / SCHEDULER_FILE).write_text(snapshot.scheduler, encoding="utf-8")
        write_run(folder, snapshot.step, run, history=snapshot.history)
    seal(folder, group)


def write_run(folder: Path, step: int, run: Mapping[str, Any], **more: Any) -> None:
    """Write `run.json`: the step, the run's fingerprint, and `more`."""
    said = {"step": step, **more, "fingerprint": run}
    content = json.dumps(said, indent=2, allow_nan=False)
    (folder / RUN_FILE).write_text(content, encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """What `write_run` has written."""
    found: dict[str, Any] = _json(folder / RUN_FILE)
    return found


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Bring `state` to where `folder` was saved; every process calls this."""
    load_tensors(state.model, state.optimizer, folder / "state")
    state.scheduler.load_state_dict(_json(folder / SCHEDULER_FILE))
    random = folder / _random_file(own_rank())
    if random.exists():  # there are fewer where the run had fewer processes
        states = load_file(random)
        torch.set_rng_state(states.pop("cpu"))
        if states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([states[f"cuda_{n}"] for n in range(len(states))])
    run = read_run(folder)
    state.step = run["step"]
    state.history = StepHistory(num_skipped=run.get("history", {}).get("num_skipped", 0))


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


def _random_file(rank: int) -> str:
    """The file with the states of a rank's random generators."""
    return f"random_{rank}.safetensors"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
