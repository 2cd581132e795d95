"""Attention kernels of one block, and the choice between them."""

from longctx_patch.kernels.base import Kernel, KernelRequest
from longctx_patch.kernels.registry import available, choose_kernel

__all__ = ["Kernel", "KernelRequest", "available", "choose_kernel"]
