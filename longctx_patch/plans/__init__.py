"""Schedules of distributed attention as data: built, checked and costed without any device."""

from longctx_patch.plans.burst import burst_backward
from longctx_patch.plans.direct_ring import direct_ring
from longctx_patch.plans.distflash import distflash
from longctx_patch.plans.double_ring import double_ring
from longctx_patch.plans.registry import make_named_plan
from longctx_patch.plans.ring import ring_backward, ring_forward
from longctx_patch.plans.traffic import AttentionShape, plan_traffic
from longctx_patch.plans.types import (
    Block,
    Direction,
    Operand,
    Plan,
    RankStep,
    Step,
    Transfer,
    Work,
)
from longctx_patch.plans.verify import PlanError, PlanReport, verify_plan

__all__ = [
    "AttentionShape",
    "Block",
    "Direction",
    "Operand",
    "Plan",
    "PlanError",
    "PlanReport",
    "RankStep",
    "Step",
    "Transfer",
    "Work",
    "burst_backward",
    "direct_ring",
    "distflash",
    "double_ring",
    "make_named_plan",
    "plan_traffic",
    "ring_backward",
    "ring_forward",
    "verify_plan",
]
