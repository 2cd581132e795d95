"""A run that is asked to end saves first: SIGTERM of spot machines, SIGUSR1 of Slurm, SIGHUP of a
terminal that was closed.

A signal only leaves a note. Ranks compare their notes at the end of a step, with numbers that they
exchange anyway, so all stop after the same one. A second signal ends a process at once.
"""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from longctx_patch.rules.together import num_ranks

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit codes of a run that a signal has stopped after its checkpoint was complete, as shells count
signals: 143 for SIGTERM, 138 for SIGUSR1 (on Linux), 129 for SIGHUP."""
SAME_S = 1.0
"""Signals that come within this time are one: who signals all processes of a terminal or a job
reaches the launcher as well, which hands it on."""


def stop_signals() -> list[signal.Signals]:
    """Lists the signals that stop this process: not SIGHUP under nohup, and SIGUSR1 also where it
    is ignored, by which a process outlives one that comes before the run has begun."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [each for each in STOP_SIGNALS if each != signal.SIGHUP or hangs_up]


class StopSignals:
    """Takes signals between entering and leaving, in the main thread of a process."""

    def __init__(self) -> None:
        self.asked = 0
        """The signal that this process was sent; 0 for none."""
        self.agreed = 0
        """The signal after which all ranks stop; 0 while they go on."""
        self._since = 0.0
        self._terminals: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._terminals = [each for each in (1, 2) if os.isatty(each)]
            self._before = {each: signal.signal(each, self._note) for each in stop_signals()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before = {}

    @property
    def exit_code(self) -> int:
        """The process's exit code once it has saved and ended."""
        return 128 + self.agreed

    def words(self, step: int, checkpoint: object) -> str:
        """Returns what a user is told at the end."""
        name = signal.Signals(self.agreed).name
        return (
            f"stopped by {name} after step {step}, whose checkpoint is {checkpoint}. Go on with "
            f"--resume. (Exit code {self.exit_code}.)"
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._since > SAME_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.asked:
            self.asked, self._since = number, time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """What is printed to a terminal that is gone would be an error, before the run is saved."""
        for stream in self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class Agreement:
    """Compares notes beside a step, for loops that exchange no number of their own at its end.

    The exchange is begun with the step and has long ended with it: nothing waits. Each rank makes
    one, all at the same time.
    """

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop
        self._group = dist.new_group(backend="gloo") if num_ranks() > 1 else None
        self._work: Any = None
        self._note = torch.zeros(1, dtype=torch.int64)

    def begin(self) -> None:
        """Call it as a step begins."""
        self._note = torch.tensor([self._stop.asked])
        if self._group is not None:
            self._work = dist.all_reduce(
                self._note, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def end(self) -> None:
        """Call it as the step ends: then `agreed` is the same on all ranks."""
        if self._work is not None:
            self._work.wait()
        self._stop.agreed = int(self._note)
