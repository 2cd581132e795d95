"""Orders the kernels that may be taken on this machine: on GPUs, as measured here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from longctx_patch.kernels.base import Kernel, KernelRequest
from longctx_patch.kernels.select.cache import ProbeCache, default_path, machine_label
from longctx_patch.kernels.select.probe import Measured, measure
from longctx_patch.kernels.select.registry import RECORDS, available, candidates, usual_order

Measure = Callable[[Iterable[Kernel], KernelRequest], Mapping[str, Measured]]


class Preference(NamedTuple):
    order: tuple[str, ...]
    """Names to try, the best first."""
    problems: Mapping[str, str]
    """Why a kernel must not be taken here, by its name: it raises, or its numbers are wrong."""


def preferred(
    name: str, request: KernelRequest, cache: ProbeCache | None = None, measure: Measure = measure
) -> Preference:
    """The order in which to try the kernels that `name` stands for, and which not to try.

    On GPUs the kernels that accept the request are checked and timed once for each rounded request
    and machine, even a kernel that was named. With `deterministic` time decides nothing, since
    another kernel may be fastest in the next run.
    """
    names = candidates(name, request)
    mine = measurable(request, names) if request.device_type == "cuda" else []
    if not mine:
        return Preference(names, {})
    try:
        measured = measured_here(mine, request, cache or machine_cache(), measure)
    except torch.OutOfMemoryError:
        return Preference(names, {})
    problems = {name: one.problem for name, one in measured.items() if one.problem is not None}
    if request.deterministic:
        return Preference(tuple(name for name in names if name not in problems), problems)
    return Preference(measured_order(names, measured), problems)


def measured_order(names: Sequence[str], measured: Mapping[str, Measured]) -> tuple[str, ...]:
    """Kernels measured to be right, the fastest first, and then those that were not measured."""
    right = [name for name in names if name in measured and measured[name].problem is None]
    right.sort(key=lambda name: measured[name].total_s)
    return (*right, *(name for name in names if name not in measured))


def measurable(request: KernelRequest, names: Sequence[str] | None = None) -> list[str]:
    """The kernels among `names`, or all, that are worth measuring and can do what is asked."""
    kernels = available(deterministic=request.deterministic)
    worth_it = {record.kernel.name for record in RECORDS if record.is_probed}
    return [
        name
        for name in (usual_order(request) if names is None else names)
        if name in worth_it and kernels[name].refuses(request) is None
    ]


def measured_here(
    names: list[str], request: KernelRequest, cache: ProbeCache, measure: Measure = measure
) -> Mapping[str, Measured]:
    """Reads what the cache says of these kernels; measures all of them if it lacks one."""
    known = cache.read(request)
    if names and not known.keys() >= set(names):
        kernels = available(deterministic=request.deterministic)
        known = {**known, **measure([kernels[name] for name in names], request)}
        cache.write(request, known)
    return {name: known[name] for name in names}


def machine_cache() -> ProbeCache:
    """This user's cache, for this machine and the software now installed on it."""
    return ProbeCache(default_path(), machine_label(package_versions()))


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that kernels come in, by kernel; None where it is not installed."""
    return {
        record.kernel.name: record.version() for record in RECORDS if record.package is not None
    }
