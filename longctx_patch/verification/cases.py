"""The cases that are verified, and their results."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from longctx_patch.config import LongContextConfig
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.plans.generators.table import SPARSE_PLAN
from longctx_patch.sequence.layout import LayoutName

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
"""Largest relative error of loss, logits and gradients, by dtype."""


def all_configs(
    num_ranks: int,
    *,
    layouts: tuple[LayoutName, ...] = ("zigzag", "contiguous"),
    checkpoint: CheckpointPolicy = "none",
    max_ulysses: int | None = None,
) -> list[LongContextConfig]:
    """Every way to cut a sequence over `num_ranks` ranks, with Ulysses up to `max_ulysses`."""
    degrees = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [
        LongContextConfig(
            ulysses_degree=ulysses,
            ring_degree=num_ranks // ulysses,
            layout=layout,
            checkpoint=checkpoint,
        )
        for ulysses in degrees
        if max_ulysses is None or ulysses <= max_ulysses
        for layout in layouts
    ]


def plan_name(config: LongContextConfig, *, packed: bool = False) -> str:
    """Name of what a config runs in layers with full attention, such as `ulysses+zigzag`."""
    ring: str = config.plan
    if ring == "auto":
        ring = SPARSE_PLAN if packed else config.placement
    if config.sequence_degree == 1:
        return "single"
    if config.ring_degree == 1:
        return "ulysses"
    return ring if config.ulysses_degree == 1 else f"ulysses+{ring}"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of one config against one unpatched process, the same on every rank."""

    loss_rel_err: float
    logits_rel_err: float
    grad_rel_err: float
    """Error of the gradient of `worst_parameter`, the largest of all parameters."""
    worst_parameter: str
    grad_norm_rel_err: float

    def within(self, tolerance: float) -> bool:
        """Says whether all errors are within the tolerance; NaN never is."""
        found = (self.loss_rel_err, self.logits_rel_err, self.grad_rel_err, self.grad_norm_rel_err)
        return all(error <= tolerance for error in found)


@dataclass(frozen=True, kw_only=True)
class CaseResult(Errors):
    """One config against one unpatched process. Messages and bytes are sums over all ranks."""

    family: str
    mask: str
    """Mask of each kind of layer: `causal`, `window 23`, ..."""
    plan: str
    ulysses: int
    ring: int
    layout: str
    checkpoint: str
    messages: int
    bytes: int
    predicted_messages: int
    predicted_bytes: int
    traffic_as_predicted: bool
    """True if they are equal on every rank, not only in the sum."""
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all cases."""

    model_type: str
    num_ranks: int
    dtype: str
    seq_len: int
    tolerance: float
    cases: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        return bool(self.cases) and all(case.ok for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        """Plain values; an error that is not a finite number becomes None."""
        values = {"ok": self.ok, **asdict(self)}
        values["cases"] = [
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in case.items()
            }
            for case in values["cases"]
        ]
        return values
