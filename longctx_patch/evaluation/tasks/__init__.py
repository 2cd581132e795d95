"""Rows to evaluate on: retrieval tasks of any length, and questions of the user's own."""

from longctx_patch.evaluation.tasks.make import TASKS, haystacks, make_at_lengths, make_samples
from longctx_patch.evaluation.tasks.materials import Sources
from longctx_patch.evaluation.tasks.questions import read_questions
from longctx_patch.evaluation.tasks.sample import Sample

__all__ = [
    "TASKS",
    "Sample",
    "Sources",
    "haystacks",
    "make_at_lengths",
    "make_samples",
    "read_questions",
]
