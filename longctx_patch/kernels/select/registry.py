"""Which kernels there are, and which one to take."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import torch

from longctx_patch.kernels.backends.cudnn import CudnnKernel
from longctx_patch.kernels.backends.dense import DenseKernel
from longctx_patch.kernels.backends.flash_attn_2 import FlashAttn2Kernel
from longctx_patch.kernels.backends.flash_attn_3 import FlashAttn3Kernel
from longctx_patch.kernels.backends.flash_attn_4 import FlashAttn4Kernel
from longctx_patch.kernels.backends.flex import FlexKernel
from longctx_patch.kernels.backends.torch_cpu import TorchCpuKernel
from longctx_patch.kernels.backends.torch_flash import TorchFlashKernel
from longctx_patch.kernels.base import Kernel, KernelRequest, dtype_name

# What `auto` tries where nothing was measured, the fastest first (docs/reference/kernels.md).
# cuDNN takes one segment a call, so masks of many pieces are better off with packed segments.
# The reference is only taken by name.
_ORDER = (
    *("flash_attn_4", "flash_attn_3", "cudnn", "torch_flash", "flash_attn_2"),
    *("flex", "torch_cpu", "torch_eager"),
)
_ORDER_OF_PIECES = (
    *("flash_attn_4", "flash_attn_3", "torch_flash", "flash_attn_2", "cudnn"),
    *("flex", "torch_cpu", "torch_eager"),
)


@cache
def available(*, deterministic: bool = False) -> Mapping[str, Kernel]:
    """Kernels by name. `deterministic`: those that can sum in a fixed order do."""
    kernels: tuple[Kernel, ...] = (
        FlashAttn4Kernel(deterministic),
        FlashAttn3Kernel(),
        CudnnKernel(),
        TorchFlashKernel(deterministic),
        FlashAttn2Kernel(deterministic),
        FlexKernel(),
        TorchCpuKernel(),
        DenseKernel("torch_eager", None),
        DenseKernel("reference", torch.float64),
    )
    return {kernel.name: kernel for kernel in kernels}


def usual_order(request: KernelRequest) -> tuple[str, ...]:
    """Names of the kernels that `auto` may take, the one that is usually fastest first."""
    return _ORDER_OF_PIECES if request.pieces else _ORDER


def candidates(name: str, request: KernelRequest) -> tuple[str, ...]:
    """Names that `name` stands for. Raises ValueError for an unknown one."""
    kernels = available()
    if name not in ("auto", *kernels):
        raise ValueError(f"kernel={name!r}: choose auto or one of {', '.join(kernels)}.")
    return usual_order(request) if name == "auto" else (name,)


@cache
def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """The named kernel, or for `auto` the first of the usual order, that can do what is asked.

    Raises ValueError with what is asked and each kernel's reason where none can.
    """
    kernels = available(deterministic=request.deterministic)
    names = candidates(name, request)
    for candidate in names:
        if kernels[candidate].refuses(request) is None:
            return kernels[candidate]
    raise ValueError(refusal(name, names, request))


def refusal(
    name: str,
    names: Sequence[str],
    request: KernelRequest,
    problems: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What to say where none of `names` can do what is asked; `problems` of those that could, as
    measured on this machine."""
    kernels = available(deterministic=request.deterministic)
    why_not = {n: problems.get(n) or kernel.refuses(request) for n, kernel in kernels.items()}
    reasons = [f"  {candidate}: {why_not[candidate]}" for candidate in names]
    fits = [kernel for kernel in kernels.values() if why_not[kernel.name] is None]
    return f"kernel={name!r}: no kernel for {words(request)}:\n" + "\n".join(reasons) + _fix(fits)


def words(request: KernelRequest) -> str:
    asked = [f"{dtype_name(request.dtype)} with head dim {request.head_dim}"]
    asked += ["softcap of scores"] if request.softcap else []
    asked += ["tables of allowed pairs"] if request.tiles else []
    asked += ["a deterministic backward"] if request.deterministic else []
    return f"{', '.join(asked)} on {request.device_type}"


def _fix(fits: list[Kernel]) -> str:
    if not fits:
        return "\nUse tensors of a floating-point dtype."
    return f"\nUse kernel='auto', or one of {', '.join(kernel.name for kernel in fits)}."
