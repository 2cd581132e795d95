"""The order in which `auto` tries kernels: on GPUs, as measured on this machine."""

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch

from longctx_patch.kernels.base import Kernel, KernelRequest
from longctx_patch.kernels.flash_attn_2 import FlashAttn2Kernel
from longctx_patch.kernels.flash_attn_3 import FlashAttn3Kernel
from longctx_patch.kernels.flash_attn_4 import FlashAttn4Kernel
from longctx_patch.kernels.probe import Measured, measure
from longctx_patch.kernels.probe_cache import ProbeCache, default_path, machine_label
from longctx_patch.kernels.registry import available, usual_order

Measure = Callable[[Iterable[Kernel], KernelRequest], Mapping[str, Measured]]

# Those that can be the fastest. FlexAttention takes long to compile and the others are slow, so
# they are only taken where none of these can.
_MEASURED = frozenset({"flash_attn_4", "flash_attn_3", "cudnn", "torch_flash", "flash_attn_2"})


def preferred_order(
    request: KernelRequest, cache: ProbeCache | None = None, measure: Measure = measure
) -> tuple[str, ...]:
    """Names that `auto` tries, the fastest first, without kernels found to be wrong.

    On GPUs the kernels that can are measured once for each rounded request and machine. With
    `deterministic` they are not: what is fastest may change between two runs.
    """
    if request.device_type != "cuda" or request.deterministic:
        return usual_order(request)
    names = measurable(request)
    try:
        measured = measured_here(names, request, cache or machine_cache(), measure)
    except torch.OutOfMemoryError:
        return usual_order(request)
    return measured_order(request, measured)


def measured_order(request: KernelRequest, measured: Mapping[str, Measured]) -> tuple[str, ...]:
    """Those measured to be right, the fastest first, and then those that were not measured."""
    right = [name for name, one in measured.items() if one.problem is None]
    right.sort(key=lambda name: measured[name].total_s)
    return (*right, *(name for name in usual_order(request) if name not in measured))


def measurable(request: KernelRequest) -> list[str]:
    """Kernels worth measuring that can do what is asked, in the usual order."""
    kernels = available()
    return [
        name
        for name in usual_order(request)
        if name in _MEASURED and kernels[name].refuses(request) is None
    ]


def measured_here(
    names: list[str], request: KernelRequest, cache: ProbeCache, measure: Measure = measure
) -> Mapping[str, Measured]:
    """From the file, or else measured now, with a warning for each kernel that must not be used."""
    known = cache.read(request)
    if names and not known.keys() >= set(names):
        kernels = available()
        known = dict(measure([kernels[name] for name in names], request))
        cache.write(request, known)
    asked = {name: known[name] for name in names}
    for name, one in asked.items():
        problem = one.problem
        if problem is not None:
            warnings.warn(
                f"kernel {name} {problem} on this machine, so kernel='auto' does not take it; "
                "`longctx kernels` shows what was found.",
                RuntimeWarning,
                stacklevel=2,
            )
    return asked


def machine_cache() -> ProbeCache:
    """The file of this user, for the machine as it is."""
    return ProbeCache(default_path(), machine_label(package_versions()))


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that kernels come in, by kernel; None where it is not installed."""
    packaged = (FlashAttn4Kernel(), FlashAttn3Kernel(), FlashAttn2Kernel())
    return {kernel.name: kernel.package.version for kernel in packaged}
