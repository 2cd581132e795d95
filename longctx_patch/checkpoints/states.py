"""Takes weights and optimizer states by name from a model and its optimizer, and loads them back,
in torch's distributed format. `series` has checked a folder before: nothing here looks for
damage."""

import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from longctx_patch.health.finite import torch_optimizer
from longctx_patch.rules.together import num_ranks

from .plain_pickle import MetadataReader, load_plain, one_process_is_fine

WRITERS = 4
"""Threads with which each process writes states: 2 GiB took 0.9 s with four, 3.7 s with one."""


def write_states(tensors: dict[str, Any], folder: Path, group: ProcessGroup | None = None) -> None:
    """Write tensors, of which ranks may hold parts, into a folder of their own; every process calls
    this. `group`: see `of_all_ranks`."""
    one_process_is_fine()
    dcp.save(
        tensors,
        storage_writer=Writer(folder),
        process_group=group,
        no_dist=num_ranks() == 1,
    )


class Writer(dcp.FileSystemWriter):
    """torch's writer with threads of our own, a file each: torch loses the errors of its threads,
    and a full disk would go unnoticed."""

    def __init__(self, folder: Path) -> None:
        # Without copying ahead, which torch does for a single thread, as it takes each of ours for.
        super().__init__(folder, thread_count=WRITERS, per_thread_copy_ahead=0)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:  # of a file that they don't name
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise OSError(f"states could not be written to {self.path}: {error}") from error

    def _write_data(self, planner: dcp.SavePlanner, file_queue: queue.Queue[Any]) -> Any:
        def write(file: Any) -> Any:
            alone: queue.Queue[Any] = queue.Queue()
            alone.put(file)
            return super(Writer, self)._write_data(planner, alone)

        self.thread_count = 1  # the files have been divided
        files = [file_queue.get() for _ in range(file_queue.qsize())]
        with ThreadPoolExecutor(WRITERS) as pool:
            done = [result.value() for result in pool.map(write, files)]
        whole: torch.futures.Future[Any] = torch.futures.Future()
        whole.set_result([each for results in done for each in results])
        return whole


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
