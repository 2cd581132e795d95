"""Schedules of distributed attention as data: built, checked and costed without any device."""

from longctx_patch.plans.generators.allgather import allgather
from longctx_patch.plans.generators.burst import burst_backward
from longctx_patch.plans.generators.direct_ring import direct_ring
from longctx_patch.plans.generators.distflash import distflash
from longctx_patch.plans.generators.double_ring import double_ring
from longctx_patch.plans.generators.ring import ring
from longctx_patch.plans.generators.table import make_schedule
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Moves, Schedule, Stage, Works
from longctx_patch.plans.traffic import AttentionShape, Traffic, bytes_per_link, plan_traffic
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
    "AttentionShape",
    "Block",
    "Direction",
    "Moves",
    "Operand",
    "PieceTable",
    "Plan",
    "PlanError",
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
    "allgather",
    "burst_backward",
    "bytes_per_link",
    "direct_ring",
    "distflash",
    "double_ring",
    "make_schedule",
    "plan_traffic",
    "ring",
    "verify_plan",
]
