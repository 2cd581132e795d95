"""Saves the steps of one run as it goes, and deletes what is no longer to be kept."""

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from longctx_patch.checkpoints.names import Series
from longctx_patch.checkpoints.retention import Retention, delete_old
from longctx_patch.health.last_words import say as say_here
from longctx_patch.health.weights import check_saved_weights
from longctx_patch.memory.host import available_bytes
from longctx_patch.plugin.together import num_ranks, of_all_ranks, own_rank

from .background import Background
from .snapshot import Copier, Snapshot, shared_snapshot
from .state import TrainState
from .writing import WriteModel, write_checkpoint

SPARE = 1.2
"""Times what is needed, the host has to have free: other programs need some too."""
SOON_S = 5.0
"""How long an error waits for a checkpoint without words."""
LONGEST_S = 365 * 86400.0
"""For an exchange without a limit: torch takes no infinity."""


class Keeper:
    """The checkpoints of one run, as a context: at its end they are all on disk.

    In the background, training waits only while its states are copied to the host, on which they
    take as much memory as on the device. Where the host has less, a checkpoint is written while
    training waits, which is said.

    Args:
        series: where they go.
        run: the run's fingerprint.
        write_model: writes the model as plain libraries load it.
        retention: which of them are kept.
        device: of the training.
        in_background: whether training may go on while a checkpoint is written.
        timeout_s: how long writing one may take.
        say: prints for the job.
        waiting: a context within which training waits for a checkpoint: that of the watchdog, which
            ends a job that waits too long and says for whom.
        beside: a context, made of words, within which one is written in the background.

    All ranks make it together, since in the background it has a process group of its own.
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
        self._say, self._timeout_s = say, timeout_s
        self._waiting, self._beside = waiting, beside
        self._copier = Copier(device.type) if in_background else None
        self._has_waited = False
        self._background = Background()
        self._group = None
        if in_background and num_ranks() > 1:  # that of the training is busy meanwhile
            # Its exchanges must not end before `look` and the watchdog, which name a rank.
            patience = timedelta(seconds=min(4 * timeout_s + 60, LONGEST_S))
            self._group = dist.new_group(backend="gloo", timeout=patience)

    def save(self, state: TrainState) -> Path:
        """Save the step `state.step`; every process calls this. Older checkpoints go only when it
        is complete on disk. Returns its folder.

        Raises:
            ValueError: on all ranks, if a weight is not finite.
            OSError: of this checkpoint, or of the one before.
        """
        with self._waiting():
            self._background.settle()
            check_saved_weights(state.model, self._device, state.step)
            snapshot, folder = shared_snapshot(state), self._series.path_of(state.step)
            if self._copier is not None and self._fits(self._copier, snapshot):
                copy = self._copier.copy(snapshot)
                self._background.start(partial(self._write_beside, copy, folder))
            else:
                self._write(snapshot, folder, None)
        return folder

    def look(self) -> None:
        """Raise the error of a checkpoint that could not be written. Waits for one only where
        writing it takes longer than it may: a disk or a rank doesn't answer any more."""
        if self._background.seconds() > self._timeout_s:
            self.settle()
        self._background.look()

    def settle(self) -> None:
        """Wait until the last checkpoint is complete on disk. Raises the error if it can't be."""
        with self._waiting():
            self._background.settle()

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self.settle()
        if not isinstance(error, Exception):  # Ctrl-C waits for nothing
            return
        with self._waiting():  # no error leaves it, so that the run's own has its place afterwards
            try:  # what has been saved is not lost by what fails afterwards
                self._background.settle(SOON_S)
                if self._background.seconds():
                    say_here(
                        f"rank {own_rank()} failed with {type(error).__name__}: {error}\nIt ends "
                        "when the last checkpoint is written."
                    )
                    self._background.settle(self._timeout_s)
            except (Exception, CheckpointException) as other:
                say_here(f"besides, the last checkpoint could not be written: {other}")

    def _write_beside(self, copy: Snapshot, folder: Path) -> None:
        with self._beside(f"{folder.name} is written"):
            self._write(copy, folder, self._group)

    def _write(self, snapshot: Snapshot, folder: Path, group: dist.ProcessGroup | None) -> None:
        write_checkpoint(snapshot, folder, self._run, self._write_model, group, self._say)
        if own_rank() == 0:
            delete_old(self._series, self._retention)

    def _fits(self, copier: Copier, snapshot: Snapshot) -> bool:
        """Whether every machine has room for the copies of its ranks, and rank 0's for a whole
        model too. Collective; ranks agree."""
        needed = max(0, snapshot.bytes_here - copier.bytes_held)
        if own_rank() == 0:
            weights = snapshot.tensors["model"].values()
            needed += sum(weight.numel() * weight.dtype.itemsize for weight in weights)
        everyones = of_all_ranks((socket.gethostname(), needed, available_bytes()))
        for host in {host for host, _, _ in everyones}:
            needed = sum(bytes_ for name, bytes_, _ in everyones if name == host)
            free = min(free for name, _, free in everyones if name == host)
            if needed * SPARE > free:
                self._say_why(host, needed, free)
                return False
        return True

    def _say_why(self, host: str, needed: int, free: int) -> None:
        if not self._has_waited:
            self._has_waited = True
            self._say(
                f"training waits while checkpoints are written: to go on meanwhile, {host} would "
                f"need {SPARE * needed / 2**30:.1f} GiB of host memory and has "
                f"{free / 2**30:.1f}."
            )
