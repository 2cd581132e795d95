"""What a run restores, beside its data, to go on exactly."""

import dataclasses
from typing import Any

import torch

from longctx_patch.health.finite import StepHistory


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """What changes while training and has to be restored."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int = 0
    """Optimizer steps done or skipped; with the row order this is also the position in the data."""
    history: StepHistory = dataclasses.field(default_factory=StepHistory)
