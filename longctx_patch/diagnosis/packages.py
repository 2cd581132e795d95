"""Python and the packages, against what this package's own metadata (setup.py) asks for."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from longctx_patch.diagnosis.check import Check

_US = "longctx-patch"
_SHOWN = 4
"""The first requirements are those that change numbers: torch, transformers, Accelerate, PEFT."""
_DEVELOPERS = "dev"


@dataclass(frozen=True)
class Installed:
    """What is asked for, and what is there."""

    python: str
    wanted_python: str
    """A specifier, such as `>=3.11`."""
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
    """What this Python has; None where longctx-patch itself is not installed."""
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
    python = ours.metadata["Requires-Python"] or ""
    return Installed(platform.python_version(), python, wanted, versions)


def check_python(found: Installed) -> Check:
    """Whether the interpreter is new enough."""
    text = f"{found.python}, {found.wanted_python} is needed"
    if SpecifierSet(found.wanted_python).contains(found.python, prereleases=True):
        return Check("python", "ok", text)
    return Check("python", "failed", text, "make a new environment: make PYTHON=python3.12 install")


def check_packages(found: Installed | None) -> Check:
    """Whether every required package is there in a version that is supported."""
    if found is None:
        text = f"{_US} runs from its sources without being installed"
        return Check("packages", "failed", text, "in the clone: pip install -e .")
    needed = [each for each in map(Requirement, found.wanted) if each.marker is None]
    wrong = [each for each in needed if not _fits(each, found.versions)]
    names = [each.name for each in needed[:_SHOWN] if each not in wrong]
    shown = [f"{name} {found.versions[name]}" for name in names]
    if not wrong:
        rest = len(needed) - len(names)
        return Check("packages", "ok", f"{', '.join(shown)} and {rest} others")
    return Check("packages", "failed", _named(wrong, found.versions), _pip(wrong))


def check_extras(found: Installed) -> Check:
    """Whether packages of extras that are there have a version that is supported."""
    optional = {each.name: each for _, each in _optional(found.wanted)}
    there = {name: found.versions[name] for name in sorted(optional.keys() & found.versions.keys())}
    wrong = [optional[name] for name in there if not _fits(optional[name], found.versions)]
    if wrong:
        return Check("extras", "warning", _named(wrong, found.versions), _pip(wrong))
    extras = {extra for extra, each in _optional(found.wanted) if each.name not in there}
    shown = ", ".join(f"{name} {number}" for name, number in there.items()) or "none"
    without = f"; extras without their packages: {', '.join(sorted(extras))}" if extras else ""
    return Check("extras", "ok", shown + without)


def _optional(wanted: tuple[str, ...]) -> Iterator[tuple[str, Requirement]]:
    """(extra, requirement) of all extras that users choose."""
    for each in map(Requirement, wanted):
        if each.marker is None:
            continue
        extra = str(each.marker).partition("extra == ")[2].strip("\"'")
        if extra != _DEVELOPERS:
            yield extra, each


def _fits(wanted: Requirement, versions: Mapping[str, str]) -> bool:
    there = versions.get(wanted.name)
    return there is not None and wanted.specifier.contains(there, prereleases=True)


def _named(wrong: list[Requirement], versions: Mapping[str, str]) -> str:
    return ", ".join(
        f"{each.name} {versions[each.name]} ({each.specifier} is supported)"
        if each.name in versions
        else f"{each.name} is not installed"
        for each in wrong
    )


def _pip(wrong: list[Requirement]) -> str:
    """The command that installs them, without the markers of their extras."""
    texts = (str(each).partition(";")[0].strip() for each in wrong)
    return "pip install " + " ".join(f'"{text}"' for text in texts)
