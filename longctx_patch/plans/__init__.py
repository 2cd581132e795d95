"""Schedules of distributed attention as data: built, checked and costed without any device."""

from longctx_patch.plans.generators.table import PLANS, PlanRecord, make_schedule
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.traffic import AttentionShape, Traffic, plan_traffic
from longctx_patch.plans.types import (
    ALL_HEADS,
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
from longctx_patch.plans.verify.walk import PlanError, PlanReport, verify_plan

__all__ = [
    "ALL_HEADS",
    "EVERYONE",
    "PLANS",
    "AttentionShape",
    "Block",
    "Direction",
    "Moves",
    "Operand",
    "PieceTable",
    "Plan",
    "PlanError",
    "PlanRecord",
    "PlanReport",
    "RankStep",
    "Schedule",
    "Share",
    "Stage",
    "Step",
    "Traffic",
    "Transfer",
    "Work",
    "Works",
    "make_schedule",
    "plan_traffic",
    "verify_plan",
]
