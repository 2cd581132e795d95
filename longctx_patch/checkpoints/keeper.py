"""Saves the steps of one run as it goes, and deletes what is no longer to be kept."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from longctx_patch.health.replicas import ReplicaCheck
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.plugin.together import own_rank

from .background import BesideTraining, whole_bytes
from .series import Retention, Series, delete_old
from .train_state import Snapshot, TrainState, WriteModel, shared_snapshot, write_checkpoint


class Keeper:
    """The checkpoints of one run, as a context: at its end they are all on disk.

    Args:
        series: where they go.
        run: the run's fingerprint.
        write_model: writes the model as plain libraries load it.
        retention: which of them are kept.
        device: of the training.
        in_background: whether training may go on while a checkpoint is written, where the host has
            memory for the copy.
        timeout_s, say, waiting, beside: see `BesideTraining`.

    All ranks make it together.
    """

    def __init__(
        self,
        *,
        series: Series,
        run: Mapping[str, Any],
        write_model: WriteModel,
        retention: Retention,
        device: torch.device,
        in_background: bool,
        timeout_s: float,
        say: Callable[[str], object],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        beside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._series, self._run, self._write_model = series, run, write_model
        self._retention, self._device = retention, device
        self._say, self._waiting = say, waiting
        self._beside: BesideTraining | None = None
        if in_background:
            self._beside = BesideTraining(
                device_type=device.type,
                timeout_s=timeout_s,
                say=say,
                waiting=waiting,
                beside=beside,
            )

    def save(self, state: TrainState, replicas: ReplicaCheck | None = None) -> Path:
        """Save the step `state.step`, if `replicas` are alike; every process calls this. Older
        checkpoints go only when it is complete on disk. Returns its folder.

        Raises:
            ValueError: on all ranks, if a weight is not finite.
            ReplicasDivergedError: on all ranks, if they have different weights.
            OSError: of this checkpoint, or of the one before.
        """
        with self._waiting():
            check_saved_weights(state.model, self._device, state.step)
            if replicas is not None:
                replicas.require_alike(state.step)
            snapshot, folder = shared_snapshot(state), self._series.path_of(state.step)
            copy = self._copied(snapshot)
            if self._beside is None or copy is None:
                self._write(snapshot, folder)
            else:
                self._beside.start(folder.name, partial(self._write, copy, folder))
        return folder

    def look(self) -> None:
        """Raise the error of a checkpoint that could not be written, as `BesideTraining.look`."""
        if self._beside is not None:
            self._beside.look()

    def settle(self) -> None:
        """Wait until the last checkpoint is complete on disk. Raises the error if it can't be."""
        if self._beside is not None:
            self._beside.settle()

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._beside is not None:
            self._beside.__exit__(kind, error, trace)

    def _copied(self, snapshot: Snapshot) -> Snapshot | None:
        """On the host, where it has room: for rank 0's file of the whole model too."""
        if self._beside is None:
            return None
        weights = snapshot.tensors["model"] if own_rank() == 0 else {}
        tensors = self._beside.copied(snapshot.tensors, whole_bytes(weights))
        return None if tensors is None else dataclasses.replace(snapshot, tensors=tensors)

    def _write(self, snapshot: Snapshot, folder: Path, group: ProcessGroup | None = None) -> None:
        write_checkpoint(snapshot, folder, self._run, self._write_model, group, self._say)
        if own_rank() == 0:
            delete_old(self._series, self._retention)
