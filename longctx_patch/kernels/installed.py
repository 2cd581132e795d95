"""Looks at what this machine has: its GPU, and packages that kernels come in.

Nothing is imported before a kernel of that package is asked for.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch


def lacks_gpu(least: tuple[int, int], below: int | None = None) -> str | None:
    """Says why this machine's GPU won't do, or None.

    The GPU needs compute capability `least` or higher and a major version lower than `below`, if
    that is given.
    """
    wanted = f"{least[0]}.{least[1]}" + (" or higher" if below is None else f" to {below - 1}.x")
    try:
        found = torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError):  # torch without CUDA, or CUDA without a GPU
        return "needs an NVIDIA GPU, and torch sees none"
    if found < least or (below is not None and found[0] >= below):
        return f"needs compute capability {wanted}, this GPU has {found[0]}.{found[1]}"
    return None


@cache
def runs_triton() -> bool:
    """Says whether Triton can compile for this GPU and start what it has compiled."""
    is_nvidia = torch.version.hip is None and lacks_gpu((8, 0)) is None
    if not is_nvidia or find_spec("triton") is None:
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # builds a small program in C
    except (ImportError, OSError, RuntimeError, SubprocessError, AssertionError) as error:
        # The usual reason is a machine without a C compiler or without Python's headers.
        warnings.warn(
            f"Triton is installed but does not run here ({type(error).__name__}: {error}), so "
            "merges and the loss take several passes over memory, which is slower. To make it "
            "run, install a C compiler and Python's headers (gcc, python3-dev).",
            stacklevel=1,
        )
        return False
    return True


@dataclass(frozen=True)
class Package:
    """A distribution that may be installed, and the module of it that has the kernel."""

    distribution: str
    module: str
    least: str
    """The oldest version whose functions have the signatures that are used here."""
    install: str
    """The command that installs it."""

    @property
    def version(self) -> str | None:
        """The version that is installed, or None.

        The distribution is asked: flash-attn 2 brings a module `flash_attn.cute` of its own, which
        is not flash-attn 4, and looking for a submodule would import the package around it.
        """
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def problem(self) -> str | None:
        """Says why it can't be used and what to type, or None. Imports it if it's new enough."""
        from packaging.version import Version

        found = self.version
        if found is None:
            return f"needs the package {self.distribution}: {self.install}"
        if Version(found) < Version(self.least):
            return (
                f"needs {self.distribution} {self.least} or newer, {found} is installed: "
                f"{self.install}"
            )
        try:
            self.load()
        except Exception as error:  # whatever a build for another torch, CUDA or driver raises
            return (
                f"{self.distribution} {found} is installed, but importing {self.module} fails "
                f"({type(error).__name__}: {error}). Install it anew: {self.install}"
            )
        return None

    def load(self) -> Any:
        """Import the module."""
        return import_module(self.module)
