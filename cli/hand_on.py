"""A launcher hands SIGTERM, SIGUSR1 and SIGHUP on to the processes of a run, which save and end.

torch's launcher would end itself on SIGTERM, and kill the processes 30 seconds later. It does so on
a second one, if it is told to leave the first to this module (`LEFT_TO_TORCH`).
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException

from longctx_patch.checkpoints.signals import stop_signals

LEFT_TO_TORCH = "SIGINT,SIGQUIT"
"""Signals that torch's launcher handles itself, as its option `signals_to_handle`."""


@contextmanager
def handing_signals_on() -> Iterator[None]:
    """Within the context this process waits for those that it has started."""
    seen: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        seen.append(number)
        if seen.count(signal.SIGTERM) > 1:
            raise SignalException("a second SIGTERM", sigval=signal.SIGTERM)
        # Those that torch has started; a single process is one that Accelerate has.
        started = [each.pid for each in multiprocessing.active_children() if each.pid]
        for pid in started or [each.pid for each in psutil.Process().children()]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # one that was stopped would keep all from saving

    before = {number: signal.signal(number, hand_on) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
