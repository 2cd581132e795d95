"""What a training run will take, from a model's config alone: memory, host memory, seconds.

Reading order: `shape.py`, `machine.py`, `candidate.py`, `components.py` (bytes), `steptime.py`
(seconds), `search.py`, `report.py`.
"""

from longctx_patch.planner.candidate import Candidate, Job
from longctx_patch.planner.components import Components, predict_memory
from longctx_patch.planner.machine import GPUS, Cluster, parse_cluster
from longctx_patch.planner.report import as_json, render
from longctx_patch.planner.search import Result, longest, search
from longctx_patch.planner.shape import ModelShape, shape_of
from longctx_patch.planner.steptime import StepTime, predict_time

__all__ = [
    "GPUS",
    "Candidate",
    "Cluster",
    "Components",
    "Job",
    "ModelShape",
    "Result",
    "StepTime",
    "as_json",
    "longest",
    "parse_cluster",
    "predict_memory",
    "predict_time",
    "render",
    "search",
    "shape_of",
]
