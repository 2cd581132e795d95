"""Writing a checkpoint: a folder that is complete once its manifest is there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from longctx_patch.checkpoints.manifest import begin, seal
from longctx_patch.checkpoints.places import clear
from longctx_patch.checkpoints.plain_pickle import load_plain
from longctx_patch.checkpoints.states import write_states
from longctx_patch.plugin.together import of_all_ranks, own_rank

from .snapshot import Snapshot, random_file

RUN_FILE = "run.json"
SCHEDULER_FILE = "scheduler.json"
WriteModel = Callable[[Path, dict[str, Tensor]], object]
"""Writes whole trained weights as plain libraries load them; one process calls it."""


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
    is_main = own_rank() == 0
    if is_main:
        clear(folder, say)
        begin(folder)
    of_all_ranks(None, group)
    states = folder / "state"
    write_states(snapshot.tensors, states, group)
    save_file(snapshot.random, folder / random_file(own_rank()))
    if is_main:
        write_model(folder / "model", read_whole_weights(snapshot.tensors["model"], states))
        (folder / SCHEDULER_FILE).write_text(snapshot.scheduler, encoding="utf-8")
        write_run(folder, snapshot.step, run, history=snapshot.history)
    seal(folder, group)


def read_whole_weights(like: Mapping[str, Tensor], states: Path) -> dict[str, Tensor]:
    """The weights of all ranks, on the host of this one, from what they have written."""
    weights = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in like.items()}
    load_plain({"model": weights}, states, alone=True)
    return weights


def write_run(folder: Path, step: int, run: Mapping[str, Any], **more: Any) -> None:
    """Write `run.json`: the step, the run's fingerprint, and `more`."""
    said = {"step": step, **more, "fingerprint": run}
    content = json.dumps(said, indent=2, allow_nan=False)
    (folder / RUN_FILE).write_text(content, encoding="utf-8")
