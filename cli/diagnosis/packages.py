"""Holds what one check found; and checks packages against this package's own metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any, Literal

from packaging.requirements import Requirement

State = Literal["ok", "warning", "failed", "skipped"]
"""`failed`: training would not start or would be wrong; `warning`: slower, or soon a problem."""

_US = "longctx-patch"
_SHOWN = 4
"""The first requirements are those that change numbers: torch, transformers, Accelerate, PEFT."""


@dataclass(frozen=True)
class Check:
    """One line of `longctx doctor`."""

    name: str
    state: State
    found: str
    fix: str = ""
    """What to run or to change; empty where nothing is to be mended."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, with the unit in each name."""


@dataclass(frozen=True)
class Installed:
    """Holds what is asked for, and what is there."""

    wanted: tuple[str, ...]
    """Requirements as in the metadata, those of extras with their marker."""
    versions: Mapping[str, str]
    """Version by name, of those packages that are installed."""

    @property
    def of_numbers(self) -> dict[str, str]:
        """Versions of the packages that change numbers or messages."""
        names = (_US, *(Requirement(text).name for text in self.wanted[:_SHOWN]))
        return {name: self.versions.get(name, "-") for name in names}


def installed() -> Installed | None:
    """Returns what this Python has; None where longctx-patch itself is not installed."""
    try:
        ours = distribution(_US)
    except PackageNotFoundError:
        return None
    wanted = tuple(ours.requires or ())
    versions = {_US: ours.version}
    for name in {Requirement(text).name for text in wanted}:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return Installed(wanted, versions)


def check_packages(found: Installed | None) -> Check:
    """Checks whether every required package is there in a version that is supported."""
    if found is None:
        text = f"{_US} runs from its sources without being installed"
        return Check("packages", "failed", text, "in the clone: pip install -e .")
    needed = [each for each in map(Requirement, found.wanted) if each.marker is None]
    wrong = [each for each in needed if not _fits(each, found.versions)]
    if not wrong:
        shown = [f"{each.name} {found.versions[each.name]}" for each in needed[:_SHOWN]]
        return Check("packages", "ok", f"{', '.join(shown)} and {len(needed) - len(shown)} others")
    named = ", ".join(
        f"{each.name} {found.versions[each.name]} ({each.specifier} is supported)"
        if each.name in found.versions
        else f"{each.name} is not installed"
        for each in wrong
    )
    fix = "pip install " + " ".join(f'"{each}"' for each in wrong)
    return Check("packages", "failed", named, fix)


def _fits(wanted: Requirement, versions: Mapping[str, str]) -> bool:
    there = versions.get(wanted.name)
    return there is not None and wanted.specifier.contains(there, prereleases=True)


def check_kernels(auto: str, kernels: Sequence[Mapping[str, Any]]) -> Check:
    """Checks which attention kernel runs, and which others could.

    Args:
        auto: the kernel that `kernel="auto"` takes.
        kernels: rows of `longctx kernels --json`.
    """
    works = [row["name"] for row in kernels if row["missing"] is None]
    text = f"auto takes {auto}; these work: {', '.join(works)}"
    return Check("attention", "ok", text)


def check_fused_layers(num_gpus: int) -> Check:
    """Checks whether Triton and Liger Kernel run."""
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
