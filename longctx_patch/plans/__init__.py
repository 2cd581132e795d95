"""Schedules of distributed attention as data: built, checked and costed without any device."""

from longctx_patch.plans.generators.table import make_schedule
from longctx_patch.plans.schedule import Schedule, Stage
from longctx_patch.plans.traffic import AttentionShape, Traffic, plan_traffic
from longctx_patch.plans.types import (
    EVERYONE,
    Block,
    Direction,
    Operand,
    Plan,
    RankStep,
    Share,
    Step,
    Transfer,
    Work,
)
from longctx_patch.plans.verify.walk import PlanError, verify_plan

__all__ = [
    "EVERYONE",
    "AttentionShape",
    "Block",
    "Direction",
    "Operand",
    "Plan",
    "PlanError",
    "RankStep",
    "Schedule",
    "Share",
    "Stage",
    "Step",
    "Traffic",
    "Transfer",
    "Work",
    "make_schedule",
    "plan_traffic",
    "verify_plan",
]
