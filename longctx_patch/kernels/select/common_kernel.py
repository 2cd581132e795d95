"""All ranks of a group compute with one kernel: the first in rank 0's order that all can run."""

import warnings
from collections.abc import Callable, Mapping

from longctx_patch.kernels.base import Kernel, KernelRequest
from longctx_patch.kernels.select.preference import Preference, preferred
from longctx_patch.kernels.select.probe import rounded
from longctx_patch.kernels.select.registry import (
    available,
    candidates,
    choose_kernel,
    refusal,
    words,
)
from longctx_patch.transport import Transport
from longctx_patch.transport.meeting import Meeting, meet

_MOST_KERNELS = 12
_NOTHING = -1


class AgreedKernels:
    """The kernels that the ranks of a group have agreed on, one for each kind of request."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, KernelRequest], Kernel] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all kernels that were agreed on."""
        return tuple(sorted({kernel.name for kernel in self._kernels.values()}))

    def known(self, name: str, request: KernelRequest) -> Kernel | None:
        """The kernel, found without communication; None: the ranks have to agree first.

        Raises ValueError as `choose_kernel` does.
        """
        wanted = rounded(request)
        if wanted.device_type != "cuda":  # all ranks have the same kernels there
            return choose_kernel(name, wanted)
        return self._kernels.get((name, wanted))

    def agree(self, name: str, request: KernelRequest, everyone: Transport) -> Kernel:
        """The kernel of all ranks. Collective over `everyone` for new requests on GPUs.

        Raises ValueError on every rank if no kernel can compute the request on all of them.
        """
        kernel = self.known(name, request)
        if kernel is None:
            kernel = agreed_kernel(name, rounded(request), everyone)
            self._kernels[name, rounded(request)] = kernel
        return kernel


def agreed_kernel(
    name: str,
    request: KernelRequest,
    everyone: Transport,
    prefer: Callable[[str, KernelRequest], Preference] = preferred,
) -> Kernel:
    """The first kernel in rank 0's order that every rank computes right with. Collective."""
    kernels = available(deterministic=request.deterministic)
    numbers = {kernel: number for number, kernel in enumerate(kernels)}
    names, (order, problems) = candidates(name, request), prefer(name, request)
    if name == "auto" and everyone.group_rank == 0:
        _warn_of(problems)
    usable = [n for n in names if n not in problems and kernels[n].refuses(request) is None]
    accepted = sum(1 << numbers[n] for n in usable)
    wanted = [numbers[n] for n in order] + [_NOTHING] * (_MOST_KERNELS - len(order))
    problem = None if accepted else ValueError(refusal(name, names, request, problems))
    rows = meet(everyone, Meeting.KERNEL, (accepted, *wanted), problem)
    for number in rows[0][1:]:
        if number != _NOTHING and all(row[0] >> number & 1 for row in rows):
            kernel = kernels[tuple(kernels)[number]]
            if name == "auto" and everyone.group_rank == 0:
                _warn_of_eager(kernel, request)
            return kernel
    without = [rank for rank, row in enumerate(rows) if row[0] != accepted]
    raise ValueError(
        f"kernel={name!r}: rank(s) {without} of the group can use other kernels than this rank. "
        "`longctx kernels` says on each machine what it lacks; install the same on all."
    )


def _warn_of_eager(kernel: Kernel, request: KernelRequest) -> None:
    if kernel.name != "torch_eager" or request.device_type != "cuda":
        return
    warnings.warn(
        f"no fused kernel here takes {words(request)}: these layers compute in torch_eager, by "
        "chunks of 64 MiB of scores in float32. That is exact, and its memory grows with the "
        "length, not with its square; but it is many times slower. `longctx kernels` says what "
        "each kernel takes.",
        RuntimeWarning,
        stacklevel=3,
    )


def _warn_of(problems: Mapping[str, str]) -> None:
    for name, problem in problems.items():
        warnings.warn(
            f"kernel {name} {problem} on this machine, so kernel='auto' does not take it; "
            "`longctx kernels` shows what was found.",
            RuntimeWarning,
            stacklevel=3,
        )
