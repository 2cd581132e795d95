"""How long each part of a run may take before it counts as hung."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

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
    """Of a step, and of a batch of an evaluation. 0: ten times the median step so far, and two
    minutes at least."""
    save_s: float = 1800.0
    """Of saving a checkpoint, and of what follows the last step."""

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
