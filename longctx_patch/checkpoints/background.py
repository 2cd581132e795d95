"""Checkpoints that are written while the training goes on, from copies on the host."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_leaves

from longctx_patch.health.last_words import say as say_here
from longctx_patch.health.weights import own_part
from longctx_patch.memory.host import available_bytes
from longctx_patch.rules.together import num_ranks, of_all_ranks, own_rank

SPARE = 1.2
"""Times what is needed, the host has to have free: other programs need some too."""
SOON_S = 5.0
"""How long an error waits for a checkpoint without words."""
LONGEST_S = 365 * 86400.0
"""For an exchange without a limit: torch takes no infinity."""


class BesideTraining:
    """Writes checkpoints in a thread, as a context: at its end the last one is on disk.

    Training waits only while its tensors are copied to the host, on which they take as much memory
    as on the device. Where the host has less, it has to wait for the writing, which is said.

    Args:
        device_type: of the training.
        timeout_s: how long writing one may take.
        say: prints for the job.
        waiting: a context within which training waits for a checkpoint: that of the watchdog, which
            ends a job that waits too long and says for whom.
        beside: a context, made of words, within which one is written.

    All ranks make it together, since the thread has a process group of its own.
    """

    def __init__(
        self,
        *,
        device_type: str,
        timeout_s: float,
        say: Callable[[str], object],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        beside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._say, self._timeout_s = say, timeout_s
        self._waiting, self._beside = waiting, beside
        self._copier = Copier(device_type)
        self._has_waited = False
        self._background = Background()
        self._group: ProcessGroup | None = None
        if num_ranks() > 1:  # that of the training is busy meanwhile
            # Its exchanges must not end before `look` and the watchdog, which name a rank.
            patience = timedelta(seconds=min(4 * timeout_s + 60, LONGEST_S))
            self._group = dist.new_group(backend="gloo", timeout=patience)

    def copied(self, tensors: Any, more_bytes: int = 0) -> Any | None:
        """Copies of lists and dicts of tensors on the host, into the memory of those before; None
        on all ranks where a host has no room for them. Collective. The checkpoint before is waited
        for; raises its error.

        `more_bytes`: what writing will take on this rank beside the copies.
        """
        if seconds := self._background.seconds():
            self.say_once(f"the one before still is, after {seconds:.0f} s. Save less often")
        self._background.settle()  # it is written from the same memory
        needed = max(0, bytes_here(tensors) - self._copier.bytes_held) + more_bytes
        return self._copier.copy(tensors) if self._fits(needed) else None

    def start(self, name: str, write: Callable[[ProcessGroup | None], object]) -> None:
        """Write the checkpoint `name`; every process calls this. `write` gets the group in which
        the threads of all ranks meet. Raises the error of the checkpoint before."""
        doing = f"{name} is written"

        def task() -> None:
            with self._beside(doing):
                try:
                    write(self._group)
                except BaseException as error:  # it is raised in a later step
                    error.add_note(f"while {doing}")
                    raise

        self._background.start(task)

    def say_once(self, why: str) -> None:
        """Say why training waits for a checkpoint, the first time that it does."""
        if not self._has_waited:
            self._has_waited = True
            self._say(f"training waits while checkpoints are written: {why}.")

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

    def __enter__(self) -> Self:
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

    def _fits(self, needed: int) -> bool:
        """Says whether every machine has room for what its ranks need. Collective; ranks agree."""
        everyones = of_all_ranks((socket.gethostname(), needed, available_bytes()))
        for host in {host for host, _, _ in everyones}:
            needed = sum(bytes_ for name, bytes_, _ in everyones if name == host)
            free = min(free for name, _, free in everyones if name == host)
            if needed * SPARE > free:
                self.say_once(
                    f"to go on meanwhile, {host} would need {SPARE * needed / 2**30:.1f} GiB of "
                    f"host memory and has {free / 2**30:.1f}"
                )
                return False
        return True


class Background:
    """Runs one task at a time in a thread.

    A thread that is left behind doesn't keep the process alive: a job that fails ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._began = 0.0

    def seconds(self) -> float:
        """For how long the task that runs now has run; 0 where none does."""
        runs = self._thread is not None and self._thread.is_alive()
        return time.monotonic() - self._began if runs else 0.0

    def start(self, task: Callable[[], object]) -> None:
        """Run a task; the one before is waited for. Raises its error."""
        self.settle()
        self._began = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(task,), name="longctx-saving", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Raise the error of a task that has failed. Waits for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs, at most `timeout_s`. Raises the error of the task."""
        if self._thread is not None:
            # join takes no infinity
            self._thread.join(timeout_s and min(timeout_s, threading.TIMEOUT_MAX))
        self.look()

    def _run(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            self._error = error


def bytes_here(tensors: Any) -> int:
    """Returns what a copy of this rank's parts of all tensors in lists and dicts takes."""
    return sum(own_part(leaf).nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def whole_bytes(weights: Mapping[str, Tensor]) -> int:
    """Returns the bytes of a file of whole weights, which safetensors first makes in memory."""
    return sum(weight.numel() * weight.dtype.itemsize for weight in weights.values())


class Copier:
    """Copies tensors to the host, always into the same memory: one copy at a time is kept.

    On a GPU that memory is pinned, so that copying runs at the speed of the bus.
    """

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"
        self.bytes_held = 0
        """What the memory takes, from the first copy on."""
        # Not its public wrapper, which in torch 2.11 closes it after one copy.
        self._stager = StateDictStager(pin_memory=self._on_gpu)

    def copy(self, tensors: Any) -> Any:
        """The same lists and dicts of tensors on the host; what was copied before is overwritten.
        Tensors that share memory do so in the copy."""
        copies: Any = self._stager.stage(tensors, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()
        self.bytes_held = max(self.bytes_held, bytes_here(tensors))
        return copies
