"""Lists the kernels that there are, and takes one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from longctx_patch.kernels.backends.cudnn import CudnnKernel
from longctx_patch.kernels.backends.dense import DenseKernel
from longctx_patch.kernels.backends.flash_attn import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    FlashAttnKernel,
)
from longctx_patch.kernels.backends.flex import FlexKernel
from longctx_patch.kernels.backends.torch_cpu import TorchCpuKernel
from longctx_patch.kernels.backends.torch_flash import TORCH_FLASH
from longctx_patch.kernels.base import Kernel, KernelRequest, dtype_name
from longctx_patch.kernels.installed import Package
from longctx_patch.rules.names import require_choice


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    return None if number is None else str(number)


class Record(NamedTuple):
    """A kernel, and what those who choose or list kernels need to know of it."""

    kernel: Kernel
    is_probed: bool = False
    """It can be the fastest on a GPU, so it is measured. FlexAttention takes long to compile and
    the others are slow, so these are taken only where no measured kernel supports the request."""
    by_name_only: bool = False
    """`auto` never takes it."""
    package: Package | None = None
    """The package that brings it; None: torch."""
    version: Callable[[], str | None] = _torch_version
    """The version of the library that computes, or None where there is none."""
    in_fixed_order: Kernel | None = None
    """The kernel with sums in a fixed order, where that is a setting."""


def _flash(kernel: FlashAttnKernel) -> Record:
    package, in_fixed_order = kernel.package, replace(kernel, deterministic=True)
    version = _torch_version if package is None else lambda: package.version
    return Record(
        kernel, is_probed=True, package=package, version=version, in_fixed_order=in_fixed_order
    )


# The one that is usually fastest comes first (docs/reference/kernels.md).
RECORDS = (
    _flash(FLASH_ATTN_4),
    _flash(FLASH_ATTN_3),
    Record(CudnnKernel(), is_probed=True, version=_cudnn_version),
    _flash(TORCH_FLASH),
    _flash(FLASH_ATTN_2),
    Record(FlexKernel()),
    Record(TorchCpuKernel()),
    Record(DenseKernel("torch_eager", None)),
    Record(DenseKernel("reference", torch.float64), by_name_only=True),
)


@cache
def available(*, deterministic: bool = False) -> Mapping[str, Kernel]:
    """Kernels by name. With `deterministic`, those that can sum in a fixed order do."""
    return {
        record.kernel.name: (deterministic and record.in_fixed_order) or record.kernel
        for record in RECORDS
    }


def usual_order(request: KernelRequest) -> tuple[str, ...]:
    """Names of the kernels that `auto` may take, the one that is usually fastest first.

    Masks of many pieces run faster as packed segments than as one segment per call (cuDNN).
    """
    records = [record for record in RECORDS if not record.by_name_only]
    if request.pieces:
        records.sort(key=lambda r: (not r.is_probed, r.is_probed and not r.kernel.traits.segments))
    return tuple(record.kernel.name for record in records)


def candidates(name: str, request: KernelRequest) -> tuple[str, ...]:
    """Names that `name` stands for. Raises ValueError for an unknown one."""
    require_choice("kernel", name, ("auto", *available()))
    return usual_order(request) if name == "auto" else (name,)


@cache
def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """The named kernel, or for `auto` the first in the usual order, that can do what is asked.

    Raises ValueError, with what is asked and each kernel's reason, if none can.
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
    """The error where none of `names` can do what is asked.

    `problems`: why kernels that could are not taken, as measured on this machine.
    """
    kernels = available(deterministic=request.deterministic)
    why_not = {n: problems.get(n) or kernel.refuses(request) for n, kernel in kernels.items()}
    reasons = [f"  {candidate}: {why_not[candidate]}" for candidate in names]
    fits = [kernel for kernel in kernels.values() if why_not[kernel.name] is None]
    return f"kernel={name!r}: no kernel for {words(request)}:\n" + "\n".join(reasons) + _fix(fits)


def words(request: KernelRequest) -> str:
    """The request, as errors say it."""
    asked = [f"{dtype_name(request.dtype)} with head dim {request.head_dim}"]
    asked += ["softcap of scores"] if request.softcap else []
    asked += ["tables of allowed pairs"] if request.tiles else []
    asked += ["a deterministic backward"] if request.deterministic else []
    return f"{', '.join(asked)} on {request.device_type}"


def _fix(fits: list[Kernel]) -> str:
    if not fits:
        return "\nUse tensors of a floating-point dtype."
    return f"\nUse kernel='auto', or one of {', '.join(kernel.name for kernel in fits)}."
