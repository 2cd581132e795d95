"""Notes what the training process is busy with, since when, and how long each part may take.

The host marks what begins, which waits for nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from threading import Lock
from typing import Literal, NamedTuple

Phase = Literal["start", "step", "evaluate", "save", "end"]
"""What a process is busy with: until its first step is done, in a step, in a batch of an
evaluation, in saving a checkpoint, in all that follows the last step."""

LEAST_STEP_S = 120.0
MEDIANS = 10.0


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Limits in seconds; `float("inf")` sets none.

    Raises ValueError for a limit that is not above 0 (`step_s`: 0 or more).
    """

    start_s: float = 1800.0
    """From the start to the end of the first step."""
    step_s: float = 0.0
    """Seconds that a step, or a batch of an evaluation, may take. 0: ten times the median step so
    far, and two minutes at least."""
    save_s: float = 1800.0
    """Seconds that saving a checkpoint may take, and what follows the last step."""

    def __post_init__(self) -> None:
        for name in ("start_s", "step_s", "save_s"):
            value = getattr(self, name)
            if not (value > 0 or (value == 0 and name == "step_s")):
                least = "0 (which decides by itself) or more" if name == "step_s" else "above 0"
                flag = f"--{name.removesuffix('_s')}-timeout"
                raise ValueError(
                    f"{name}={value} ({flag}): a time limit is a number of seconds, {least}. Give "
                    "inf for no limit."
                )

    def of(self, phase: Phase, steps_s: Sequence[float]) -> float:
        """The limit of a phase, after steps that took `steps_s` each."""
        if phase == "start":
            return self.start_s
        if phase in ("save", "end"):
            return self.save_s
        return self.step_s or max(LEAST_STEP_S, MEDIANS * median(steps_s) if steps_s else 0.0)


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

    def __init__(self, limits: TimeLimits, now: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._now = limits, now
        self._lock = Lock()
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED)
        self._at = At("start", 0, now())

    @property
    def at(self) -> At:
        return self._at

    def enter(self, phase: Phase) -> None:
        """Enter a phase. A start forgets how long steps took: those to come differ."""
        with self._lock:
            if phase == "start":
                self._steps_s.clear()
            step = self._at.step + (phase == "step") - (self._at.phase == "step")
            self._at = At(phase, step, self._now(), self._at.beside)

    def done(self, step: int) -> None:
        """Step number `step` is done, and the next one begins. The first, which compiles and
        allocates, doesn't count for the median."""
        with self._lock:
            now = self._now()
            if self._at.phase == "step":
                self._steps_s.append(now - self._at.since)
            self._at = At("step", step + 1, now, self._at.beside)

    def beside(self, words: str) -> None:
        """Another thread begins this beside what is under way; no words: it has ended."""
        with self._lock:
            self._at = self._at._replace(beside=words)

    def seconds(self) -> float:
        """Spent in what is under way."""
        return self._now() - self._at.since

    def limit_s(self, phase: Phase | None = None) -> float:
        """The limit of a phase; None: of what is under way."""
        with self._lock:
            return self.limits.of(phase or self._at.phase, self._steps_s)
