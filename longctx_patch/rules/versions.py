"""Versions of the packages that this one was tested with."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

REQUIRED = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
}
"""Oldest and newest minor version. setup.py allows more: newer ones up to the next major version,
which change numbers seldom, and private names that this package relies on more often."""
EXTRA = {"trl": ("1.16", "1.16")}
"""The same of what only some need."""
TESTED = REQUIRED | EXTRA


@cache
def installed_version(name: str) -> str:
    """Reads the version of a package, once, since that takes a millisecond; a copy of this one may
    be in use without being installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def warn_untested(
    names: Iterable[str] = REQUIRED, version_of: Callable[[str], str] = installed_version
) -> None:
    """Warn of installed versions outside `TESTED`: once, since the message stays the same.

    Args:
        names: of the packages.
        version_of: the installed version of a package.
    """
    found = {name: Version(version_of(name)) for name in names}
    untested = [
        f"{name} {found[name]} (tested: {oldest} to {newest})"
        for name, (oldest, newest) in TESTED.items()
        if name in found
        if not Version(oldest).release <= found[name].release[:2] <= Version(newest).release
    ]
    if untested:
        warnings.warn(
            f"longctx-patch was not tested with {', '.join(untested)}. `longctx verify` shows "
            "whether a model's loss and gradients are exact with them.",
            stacklevel=2,
        )
