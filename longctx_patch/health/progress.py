"""What the training process is busy with, and since when: marked by the host, which waits for
nothing to do so."""

import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from longctx_patch.health.limits import Phase, TimeLimits

REMEMBERED = 101
"""Steps whose median is taken."""


class At(NamedTuple):
    phase: Phase
    step: int
    """The step under way, or, outside of steps, the last one done."""
    since: float
    """By the clock of the progress."""
    beside: str = ""
    """What another thread does meanwhile, in words."""

    def __str__(self) -> str:
        ends = f"step {self.step + 1}, the first of its length" if self.step else "the first step"
        words = {
            "start": f"the start, before the end of {ends}",
            "step": f"step {self.step}",
            "evaluate": f"an evaluation after step {self.step}",
            "save": f"saving after step {self.step}",
            "end": f"the end, after step {self.step}",
        }
        return words[self.phase] + (f" (while {self.beside})" if self.beside else "")


class Progress:
    """Written by the process that trains, and read by the thread that watches it."""

    def __init__(
        self,
        limits: TimeLimits,
        now: Callable[[], float] = time.monotonic,
        mark: Callable[[str], object] = str,
    ) -> None:
        """`mark` is told of all that begins, in words."""
        self.limits = limits
        self._mark = mark
        self._now = now
        self._lock = Lock()
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED)
        self._beside = ""
        self._change(At("start", 0, now()))

    @property
    def at(self) -> At:
        return self._at

    def enter(self, phase: Phase) -> None:
        """Enter a phase. A start forgets how long steps took: those to come differ."""
        with self._lock:
            if phase == "start":
                self._steps_s.clear()
            step = self._at.step + (phase == "step") - (self._at.phase == "step")
            self._change(At(phase, step, self._now()))

    def done(self, step: int) -> None:
        """Step number `step` is done, and the next one begins. The first, which compiles and
        allocates, doesn't count for the median."""
        with self._lock:
            now = self._now()
            if self._at.phase == "step":
                self._steps_s.append(now - self._at.since)
            self._change(At("step", step + 1, now))

    def beside(self, words: str) -> None:
        """Another thread begins this beside what is under way; no words: it has ended."""
        with self._lock:
            self._beside = words
            self._change(self._at)

    def _change(self, at: At) -> None:
        self._at = at._replace(beside=self._beside)
        self._mark(str(self._at))

    def forgive(self, seconds: float) -> None:
        """The whole process was stopped for so long, which is nobody's fault."""
        with self._lock:
            self._at = self._at._replace(since=self._at.since + seconds)

    def seconds(self) -> float:
        """Spent in what is under way."""
        return self._now() - self._at.since

    def limit_s(self, phase: Phase | None = None) -> float:
        """The limit of a phase; None: of what is under way."""
        with self._lock:
            return self.limits.of(phase or self._at.phase, self._steps_s)
