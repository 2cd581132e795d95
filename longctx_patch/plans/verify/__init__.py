"""Prove a plan correct before it runs: form, coverage, progress, and a walk through its steps."""

from longctx_patch.plans.verify.walk import PlanError, PlanReport, verify_plan

__all__ = ["PlanError", "PlanReport", "verify_plan"]
