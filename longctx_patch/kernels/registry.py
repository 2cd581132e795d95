"""Which kernels there are, and which one to take."""

from collections.abc import Mapping
from functools import cache

from longctx_patch.kernels.base import Kernel, KernelRequest
from longctx_patch.kernels.cudnn import CudnnKernel
from longctx_patch.kernels.reference import ReferenceKernel
from longctx_patch.kernels.torch_cpu import TorchCpuKernel
from longctx_patch.kernels.torch_flash import TorchFlashKernel

# `auto` takes the first that can do it; the reference is only taken by name.
_BY_PREFERENCE = (CudnnKernel, TorchFlashKernel, TorchCpuKernel, ReferenceKernel)


@cache
def available() -> Mapping[str, Kernel]:
    """Kernels by name."""
    return {kernel.name: kernel() for kernel in _BY_PREFERENCE}


@cache
def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """The named kernel, or for `auto` the first fast one, that can do what is asked.

    Raises ValueError with each kernel's reason where none can.
    """
    kernels = available()
    if name not in ("auto", *kernels):
        raise ValueError(f"kernel={name!r}: choose auto or one of {', '.join(kernels)}.")
    candidates = [k for k in kernels if k != "reference"] if name == "auto" else [name]
    reasons = []
    for candidate in candidates:
        reason = kernels[candidate].refuses(request)
        if reason is None:
            return kernels[candidate]
        reasons.append(f"  {candidate}: {reason}")
    raise ValueError(
        f"kernel={name!r}: no kernel for {request.dtype} with head dim {request.head_dim} on "
        f"{request.device_type}:\n" + "\n".join(reasons) + "\nUse bfloat16 on a GPU, or "
        "kernel='reference' (slow, any dtype and device)."
    )
