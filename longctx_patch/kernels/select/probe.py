"""Measures how fast each kernel computes one block here, and whether it computes it right.

A few blocks stand for all blocks of a request: for plain causal masks one on the diagonal and one
beside it, for masks of many pieces a row of documents. Rates in FLOP/s count two products in
forward and five in backward, of allowed pairs only (FlashAttention-2, section 4.1).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.backends.dense import DenseKernel
from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    FULL_WINDOW,
    BackwardInputs,
    Kernel,
    KernelRequest,
    Score,
    Segments,
    Window,
)
from longctx_patch.kernels.calls import Call, calls_of
from longctx_patch.kernels.run import run_backward, run_forward
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import CAUSAL, FULL, Piece

Stopwatch = Callable[[Callable[[], object]], float]
"""Seconds that one call takes."""

_MOST_ROWS, _FEWEST_ROWS, _MOST_HEADS = 8192, 1024, 32
_SOFTCAP = 50.0  # Gemma 2's
_LONGER, _MOST_WAIT_S = 3.0, 0.05  # the GPU's wait: a multiple of the CPU's time, and a limit
_CYCLES_PER_S = 2e9  # no GPU's clock is much faster
# Rounding gives about 3e-3 in bfloat16 and 4e-4 in float16; a wrong mask or scale gives 0.1 to 1.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Measured:
    """The result of measuring one kernel."""

    seconds: Mapping[str, tuple[float, float]]
    """(forward, backward) of each case."""
    problem: str | None = None
    """Why the kernel must not be taken."""

    @property
    def total_s(self) -> float:
        return sum(sum(both) for both in self.seconds.values())


def rounded(request: KernelRequest) -> KernelRequest:
    """The request whose measurement stands for this one.

    Each rounded request is measured and agreed on once, so few are told apart: rows are rounded up
    to a power of two, and heads are capped, with the ratio of query to key-value heads kept.
    """
    rows = _FEWEST_ROWS
    while rows < min(request.num_rows, _MOST_ROWS):
        rows *= 2
    group = request.num_heads // request.num_kv_heads
    kv_heads = min(request.num_kv_heads, max(1, _MOST_HEADS // group))
    return request._replace(num_rows=rows, num_heads=group * kv_heads, num_kv_heads=kv_heads)


def measure(
    kernels: Iterable[Kernel],
    request: KernelRequest,
    *,
    device: torch.device | str = "cuda",
    stopwatch: Stopwatch | None = None,
) -> dict[str, Measured]:
    """Check and time kernels that accept the request, by name; nothing else should use the GPU.

    What a kernel raises becomes its problem, except lack of memory, which is raised.
    """
    stopwatch = stopwatch or gpu_seconds
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        return {kernel.name: _measured(kernel, request, device, stopwatch) for kernel in kernels}


def allowed_pairs(case: str, rows: int) -> int:
    """The pairs of query and key that a case of `rows` rows computes, for each head."""
    return sum(piece.area for piece in _cases(rows)[case])


def _measured(
    kernel: Kernel, request: KernelRequest, device: torch.device | str, stopwatch: Stopwatch
) -> Measured:
    try:
        problem = wrong_numbers(kernel, request, device)
        if problem is not None:
            return Measured({}, problem)
        return Measured(
            {
                case: _time(kernel, _cases(request.num_rows)[case], request, device, stopwatch)
                for case in cases_of(request)
            }
        )
    except torch.OutOfMemoryError:
        raise  # lack of memory says nothing about the kernel
    except Exception as error:  # whatever a kernel raises on this machine
        return Measured({}, f"failed ({type(error).__name__}: {error})")


def cases_of(request: KernelRequest) -> tuple[str, ...]:
    return ("documents",) if request.pieces else ("causal", "full")


def _cases(rows: int) -> dict[str, tuple[Piece, ...]]:
    whole, cuts = Interval(0, rows), (0, 1, 3, 4, 8, 9, 12, 16)  # in sixteenths
    documents = [Interval(a * rows // 16, b * rows // 16) for a, b in pairwise(cuts)]
    return {
        "causal": (Piece(whole, whole, CAUSAL),),
        "full": (Piece(whole, whole, FULL),),
        "documents": tuple(Piece(part, part, CAUSAL) for part in documents),
    }


def _time(
    kernel: Kernel,
    pieces: tuple[Piece, ...],
    request: KernelRequest,
    device: torch.device | str,
    stopwatch: Stopwatch,
) -> tuple[float, float]:
    """Seconds of forward and backward over these pieces, as many calls as the kernel needs."""
    score, rows = _score(request), request.num_rows
    q, k, v, dout = _random(request, 1, rows, rows, device)
    lse_BHL = torch.zeros(1, request.num_heads, rows, dtype=torch.float32, device=device)
    given = [
        _Given(
            call,
            q=_rows(q, call.q),
            dout=_rows(dout, call.q),
            k=_rows(k, call.kv),
            v=_rows(v, call.kv),
            lse=_rows(lse_BHL.mT, call.q).mT,
        )
        for call in calls_of(pieces, kernel.traits)
    ]

    def forward() -> None:
        for call, own_q, _, own_k, own_v, _ in given:
            run_forward(kernel, call, own_q, own_k, own_v, score)

    def backward() -> None:
        for call, own_q, own_dout, own_k, own_v, lse in given:
            inputs = BackwardInputs(own_dout, own_q, own_k, own_v, own_q, lse)
            run_backward(kernel, call, inputs, score)

    return stopwatch(forward), stopwatch(backward)


class _Given(NamedTuple):
    """The tensors of one call; q stands for out too, which does not change the time."""

    call: Call
    q: Tensor
    dout: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor


def _rows(x: Tensor, intervals: tuple[Interval, ...]) -> Tensor:
    parts = [x[:, slice(*interval)] for interval in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def wrong_numbers(kernel: Kernel, request: KernelRequest, device: torch.device | str) -> str | None:
    """A sentence on how a kernel's results differ from float64, if by more than rounding."""
    for case, segments in _checks(kernel, request).items():
        for name, error in _errors(kernel, segments, request, device).items():
            if not error < _TOLERANCE.get(request.dtype, 1e-3):
                return f"gives wrong numbers ({name} of the {case} block is off by {error:.1g})"
    return None


def _checks(kernel: Kernel, request: KernelRequest) -> dict[str, Segments]:
    """Blocks of several tiles of any kernel; some end inside a tile."""
    if not request.pieces:
        return {
            "causal": Segments((320,), (320,), CAUSAL_WINDOW),
            "full": Segments((300,), (448,), FULL_WINDOW),
        }
    checks = {"causal": Segments((320,), (320,), CAUSAL_WINDOW)}
    if kernel.traits.segments:
        checks["packed"] = Segments((130, 1, 317), (130, 1, 317), CAUSAL_WINDOW)
    if kernel.traits.windows:
        checks["window"] = Segments((300,), (448,), Window(99, 0))
    return checks


def _errors(
    kernel: Kernel, segments: Segments, request: KernelRequest, device: torch.device | str
) -> dict[str, float]:
    """The relative error of each result, in the norm, against float64.

    Backward gets an out and lse that count more keys than the block's, as in a ring.
    """
    reference, score = DenseKernel("reference", torch.float64), _score(request)
    q, k, v, dout = _random(request, 2, sum(segments.q), sum(segments.kv), device)
    own_out, own_lse = reference.forward(q, k, v, segments, score)
    out, lse = (own_out * 0.6 + dout * 0.1).to(q.dtype), own_lse + 0.5
    given = BackwardInputs(dout, q, k, v, out, lse)
    right = own_out, own_lse, *reference.backward(given, segments, score)
    found = (
        *kernel.forward(q, k, v, segments, score),
        *kernel.backward(given, segments, score),
    )
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: _error(*pair) for name, *pair in zip(names, found, right, strict=True)}


def _error(found: Tensor, right: Tensor) -> float:
    difference = (found.double() - right.double()).norm() / right.double().norm()
    error = difference.item()
    return error if isfinite(error) else float("inf")


def _score(request: KernelRequest) -> Score:
    return Score(request.head_dim**-0.5, _SOFTCAP if request.softcap else None)


def _random(
    request: KernelRequest, batch: int, rows: int, columns: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout, from a separate generator, so that training's random numbers stay the same."""
    generator = torch.Generator(device).manual_seed(rows)
    heads, kv_heads = request.num_heads, request.num_kv_heads
    shapes = [(rows, heads), (columns, kv_heads), (columns, kv_heads), (rows, heads)]
    q, k, v, dout = (
        torch.randn(
            *(batch, *shape, request.head_dim),
            generator=generator,
            dtype=request.dtype,
            device=device,
        )
        for shape in shapes
    )
    return q, k, v, dout


def gpu_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """The median of a few runs, after two that compile and warm up; of the GPU's time alone.

    A block of a few heads takes the GPU less time than the CPU needs to launch it. In training the
    CPU launches it while the GPU does other work, so here an NVIDIA GPU waits before each run until
    the CPU has launched all of it.
    """
    run()
    torch.cuda.synchronize()
    begun = perf_counter()
    run()
    wait_s = min(_MOST_WAIT_S, _LONGER * (perf_counter() - begun))
    times = []
    for _ in range(repeats):
        started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if torch.version.hip is None:  # on AMD a cycle is another time
            torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))
        started.record()
        run()
        stopped.record()
        stopped.synchronize()
        times.append(started.elapsed_time(stopped) / 1000)
    return sorted(times)[repeats // 2]
