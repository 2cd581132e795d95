"""Which kernels there are, and which one to take."""

from collections.abc import Mapping
from functools import cache

import torch

from longctx_patch.kernels.base import Kernel, KernelRequest, dtype_name
from longctx_patch.kernels.cudnn import CudnnKernel
from longctx_patch.kernels.dense import DenseKernel
from longctx_patch.kernels.flex import FlexKernel
from longctx_patch.kernels.torch_cpu import TorchCpuKernel
from longctx_patch.kernels.torch_flash import TorchFlashKernel

# What `auto` tries, the fastest first. cuDNN takes one segment a call, so masks of many pieces
# are better off with packed segments. The reference is only taken by name.
_ORDER = ("cudnn", "torch_flash", "flex", "torch_cpu", "torch_eager")
_ORDER_OF_PIECES = ("torch_flash", "cudnn", "flex", "torch_cpu", "torch_eager")


@cache
def available() -> Mapping[str, Kernel]:
    """Kernels by name."""
    kernels: tuple[Kernel, ...] = (
        CudnnKernel(),
        TorchFlashKernel(),
        FlexKernel(),
        TorchCpuKernel(),
        DenseKernel("torch_eager", None),
        DenseKernel("reference", torch.float64),
    )
    return {kernel.name: kernel for kernel in kernels}


@cache
def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """The named kernel, or for `auto` the first fast one, that can do what is asked.

    Raises ValueError with what is asked and each kernel's reason where none can.
    """
    kernels = available()
    if name not in ("auto", *kernels):
        raise ValueError(f"kernel={name!r}: choose auto or one of {', '.join(kernels)}.")
    order = _ORDER_OF_PIECES if request.pieces else _ORDER
    reasons = []
    for candidate in order if name == "auto" else (name,):
        reason = kernels[candidate].refuses(request)
        if reason is None:
            return kernels[candidate]
        reasons.append(f"  {candidate}: {reason}")
    fits = [k for k in kernels.values() if k.refuses(request) is None]
    raise ValueError(
        f"kernel={name!r}: no kernel for {_words(request)}:\n" + "\n".join(reasons) + _fix(fits)
    )


def _words(request: KernelRequest) -> str:
    asked = [f"{dtype_name(request.dtype)} with head dim {request.head_dim}"]
    asked += ["softcap of scores"] if request.softcap else []
    asked += ["tables of allowed pairs"] if request.tiles else []
    return f"{', '.join(asked)} on {request.device_type}"


def _fix(fits: list[Kernel]) -> str:
    if not fits:
        return "\nUse tensors of a floating-point dtype."
    return f"\nUse kernel='auto', or one of {', '.join(kernel.name for kernel in fits)}."
