"""What one check of a machine found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["ok", "warning", "failed", "skipped"]
"""`failed`: training would not start or would be wrong; `warning`: slower, or soon a problem."""


@dataclass(frozen=True)
class Check:
    """One line of `longctx doctor`."""

    name: str
    state: State
    found: str
    fix: str = ""
    """What to run or to change; empty where nothing is to be mended."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, with the unit in each name."""
