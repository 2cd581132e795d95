"""Attention kernels and fused layers: what works here, and what would be faster. Imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from longctx_patch.diagnosis.check import Check


def check_kernels(auto: str, kernels: Sequence[Mapping[str, Any]]) -> Check:
    """Which kernel runs, and whether a faster one is missing.

    Args:
        auto: the kernel that `kernel="auto"` takes.
        kernels: rows of `longctx kernels --json`.
    """
    works = [row["name"] for row in kernels if row["missing"] is None]
    text = f"auto takes {auto}; these work: {', '.join(works)}"
    mine = next(row["share_of_best"] for row in kernels if row["name"] == auto)
    rated = [row for row in kernels if row["share_of_best"] is not None]
    best = max(rated, key=lambda row: float(row["share_of_best"]), default=None)
    on_gpu = any(row["device"] == "cuda" for row in kernels if row["name"] in works)
    if not on_gpu or best is None or best["missing"] is None:
        return Check("attention", "ok", text)
    slow = "" if mine is None else f", {mine:.0%} as fast as {best['name']}"
    text = f"auto takes {auto}{slow}; {best['name']} {best['missing']}"
    return Check("attention", "warning", text, best["install"] or "longctx kernels")


def check_fused_layers(num_gpus: int) -> Check:
    """Whether Triton and Liger Kernel run."""
    if not num_gpus:
        return Check("fused layers", "skipped", "Liger Kernel and Triton are for NVIDIA GPUs")
    from longctx_patch.hf.layers.fused_layers import LIGER
    from longctx_patch.kernels.installed import runs_triton

    if not runs_triton():
        fix = "install a C compiler and Python's headers: apt-get install gcc python3-dev"
        return Check("fused layers", "warning", "Triton does not run here, so steps are slow", fix)
    problem = LIGER.problem()
    if problem is not None:
        return Check("fused layers", "warning", problem, LIGER.install)
    return Check("fused layers", "ok", f"Triton runs, Liger Kernel {LIGER.version}")
