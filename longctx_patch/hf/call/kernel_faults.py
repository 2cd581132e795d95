"""Combinations of packages and GPUs in which a kernel of recurrent layers computes wrong gradients.

Found by a package's own maintainers, and refused here: nothing else would tell. On Hopper GPUs
Triton 3.4 to 3.7.0 compiles the backward of flash-linear-attention's gated delta rule to wrong
gradients of decays and betas (https://github.com/fla-org/flash-linear-attention/issues/640).
Versions from 0.5 on run a kernel of tilelang instead, or stop in backward where that is missing;
older ones go on. 0.5 wants tilelang with every later Triton too.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from packaging.version import Version
from torch import nn

from longctx_patch.hf.model.sequence_kernels import functions_of, runs_kernel

GATED_DELTA_RULE = "torch_chunk_gated_delta_rule"
HOPPER = 9
"""Major number of its compute capability."""
BROKEN, MENDED = Version("3.4"), Version("3.7.1")
"""The first Triton whose kernel is wrong, and the first that is right again."""
REPLACES, TRUSTS_MENDED = Version("0.5"), Version("0.6")
"""Versions of flash-linear-attention that have tilelang's kernel, and that know of the mended
Triton."""


class Installed(NamedTuple):
    """Versions, None of what is not installed."""

    triton: Version | None
    fla: Version | None
    tilelang: Version | None

    @classmethod
    def here(cls) -> "Installed":
        fla = _version("fla-core") or _version("flash-linear-attention")
        return cls(_version("triton"), fla, _version("tilelang"))


def check_faults(
    mixers: Iterable[nn.Module],
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> None:
    """Raise ValueError for recurrent layers on a GPU whose kernels would be wrong there."""
    installed = Installed.here()
    for mixer in mixers:
        function = functions_of(mixer).get(GATED_DELTA_RULE)
        weight = next(mixer.parameters())
        if function is None or not runs_kernel(function) or not weight.is_cuda:
            continue
        if installed.triton is None:  # so none of its kernels runs
            continue
        reason = delta_rule_fault(capability_of(weight.device)[0], installed)
        if reason is not None:
            raise ValueError(f"{type(mixer).__name__}: {reason}")


def delta_rule_fault(capability: int, installed: Installed) -> str | None:
    """Says why gated delta rules can't be trained, and what mends it; None where they can."""
    triton, fla, tilelang = installed
    if capability != HOPPER or triton is None or triton < BROKEN:
        return None
    fla = fla or Version("0")  # installed without metadata: from its sources, say
    if triton >= MENDED and not REPLACES <= fla < TRUSTS_MENDED:
        return None
    if fla >= REPLACES and tilelang is not None:
        return None
    return (
        f"flash-linear-attention {fla} with Triton {triton} computes wrong gradients of gated "
        f"delta rules on Hopper GPUs, or refuses to (its issue 640). pip install "
        f"'flash-linear-attention>={TRUSTS_MENDED}' tilelang, or take a torch whose Triton is "
        f"{MENDED} or newer."
    )


def _version(distribution: str) -> Version | None:
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None
