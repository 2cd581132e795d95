"""Attention kernels of packed segments, the choice between them, and what to call them with."""

from longctx_patch.kernels.base import (
    BackwardInputs,
    Kernel,
    KernelRequest,
    Score,
    Segments,
    Traits,
    Window,
)
from longctx_patch.kernels.calls import Call, calls_of
from longctx_patch.kernels.run import run_backward, run_forward
from longctx_patch.kernels.select.common_kernel import AgreedKernels
from longctx_patch.kernels.select.registry import available, choose_kernel

__all__ = [
    "AgreedKernels",
    "BackwardInputs",
    "Call",
    "Kernel",
    "KernelRequest",
    "Score",
    "Segments",
    "Traits",
    "Window",
    "available",
    "calls_of",
    "choose_kernel",
    "run_backward",
    "run_forward",
]
