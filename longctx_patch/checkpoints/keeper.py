"""Saves the steps of one run as it goes, and deletes what is no longer to be kept."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from longctx_patch.health.replicas import ReplicaCheck
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.rules.together import own_rank

from .background import BesideTraining, whole_bytes
from .series import Retention, Series, delete_old
from .train_state import Snapshot, TrainState, WriteModel, shared_snapshot, write_checkpoint


class Keeper(BesideTraining):
    """The checkpoints of one run, as a context: at its end they are all on disk.

    Args:
        series: where they go.
        run: the run's fingerprint.
        write_model: writes the model as plain libraries load it.
        retention: which of them are kept.
        device: of the training.
        how: see `BesideTraining`.

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
        **how: Any,
    ) -> None:
        super().__init__(device_type=device.type, **how)
        self._series, self._run, self._write_model = series, run, write_model
        self._retention, self._device = retention, device

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
            # Rank 0 writes a file of the whole model too.
            weights = snapshot.tensors["model"] if own_rank() == 0 else {}
            copies = self.copied(snapshot.tensors, whole_bytes(weights))
            if copies is None:
                self._write(snapshot, folder)
            else:
                copy = dataclasses.replace(snapshot, tensors=copies)
                self.start(folder.name, partial(self._write, copy, folder))
        return folder

    def _write(self, snapshot: Snapshot, folder: Path, group: ProcessGroup | None = None) -> None:
        write_checkpoint(snapshot, folder, self._run, self._write_model, group, self._say)
        if own_rank() == 0:
            delete_old(self._series, self._retention)
