"""CUDA kernels agree with float64 and do what a distributed plan asks of them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longctx_patch.kernels import (
    BackwardInputs,
    Kernel,
    KernelRequest,
    Score,
    Segments,
    available,
    choose_kernel,
)
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW
from longctx_patch.kernels.select.cache import ProbeCache
from longctx_patch.kernels.select.preference import measurable, preferred
from longctx_patch.kernels.select.probe import measure, rounded
from longctx_patch.kernels.select.registry import usual_order
from longctx_patch.sequence.regions import Tile
from tests.kernels import cases
from tests.kernels.cases import larger_pieces, larger_segments
from tests.kernels.checks import check, check_calls, check_kernel, takes
from tests.kernels.dense import Problem, answer, problem, table_of
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

PACKAGED = ["flash_attn_4", "flash_attn_3", "flash_attn_2"]
FAST = ["torch_flash", "cudnn", *PACKAGED]
KERNELS = [*FAST, "torch_eager"]
# bfloat16 has 8 bits: rounding of softmax inputs, out and gradients gives a few times 2^-9.
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
SCORE = Score(0.125)
CAPPED = Score(0.125, softcap=1.5)
SEGMENTS = {
    case: larger_segments(segments, 17)
    for case, segments in cases.SEGMENTS.items()
    if "many blocks" not in case
}
PIECES = {
    case: larger_pieces(pieces, 10) for case, pieces in cases.PIECES.items() if "tables" not in case
}
NO_CACHE = ProbeCache(Path("/dev/null/kernels.json"), "nothing is kept")


def usable(name: str, **changes: Any) -> Kernel:
    """The kernel, or the test is skipped with the reason why it can't be used here."""
    request = KernelRequest("cuda", torch.bfloat16, 64)._replace(**changes)
    kernel = available(deterministic=request.deterministic)[name]
    reason = kernel.refuses(request)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return kernel


@pytest.mark.parametrize("name", FAST)
def test_row_slices_and_a_global_lse(name: str) -> None:
    """Gradients of blocks, from the global lse, add up; slices of rows are not contiguous."""
    kernel = usable(name)
    q, k, v, dout = problem(256, 256, (8, 2), torch.bfloat16, dim=64, device="cuda")[:4]
    everything = Segments((256,), (256,), FULL_WINDOW)
    out, lse = kernel.forward(q, k, v, everything, SCORE)
    whole = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), everything, SCORE)
    halves = (slice(0, 128), slice(128, 256))
    part = Segments((128,), (128,), FULL_WINDOW)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for rows in halves:
        for columns in halves:
            own_dout, own_q, own_out = (x[:, rows] for x in (dout, q, out))
            keys, values = (x[:, columns] for x in (k, v))
            own = BackwardInputs(own_dout, own_q, keys, values, own_out, lse[:, :, rows])
            grads = kernel.backward(own, part, SCORE)
            dq[:, rows] += grads[0]
            dk[:, columns] += grads[1]
            dv[:, columns] += grads[2]
    for found, wanted in zip((dq, dk, dv), whole, strict=True):
        assert relative_error(found, wanted) < 1e-2


@pytest.mark.parametrize("name", FAST)
def test_layouts_of_out_and_dout(name: str) -> None:
    """torch caches cuDNN's graphs by the layout of q, k and v only: gradients were wrong by a third
    where out had another layout than in an earlier call of the same shape."""
    kernel = usable(name)
    segments = Segments((256,), (256,), CAUSAL_WINDOW)
    given = problem(256, 256, (8, 2), torch.bfloat16, dim=64, device="cuda")
    want = answer(given, table_of(segments), SCORE)
    out, lse = want.out.bfloat16(), want.lse.float()
    for dims in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)):
        back = [dims.index(dim) for dim in range(4)]
        laid_out, laid_dout = (
            x.permute(dims).contiguous().permute(back) for x in (out, given.dout)
        )
        for own in ((laid_out, given.dout), (out, laid_dout), (laid_out, laid_dout)):
            inputs = BackwardInputs(own[1], *given[:3], own[0], lse)
            grads = kernel.backward(inputs, segments, SCORE)
            check(grads, (want.dq, want.dk, want.dv), 1e-2)


class _Own(torch.autograd.Function):
    """A kernel's gradients, in the thread of backward, since torch keeps graphs by thread."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[[Tensor], tuple[Tensor, ...]], *inputs: Tensor) -> Any:
        ctx.backward = backward
        return torch.zeros_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.backward(dout)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_after_torch_s_own_attention(name: str, rows: int) -> None:
    """torch's own attention takes cuDNN too, and keeps the graph of its backward for calls with the
    same q, k and v: gradients of q and k were wrong by a third after a step of the stock model."""
    kernel = usable(name)
    segments = Segments((256,), (256,), CAUSAL_WINDOW)
    given = problem(256, 256, (8, 2), torch.bfloat16, dim=64, device="cuda")
    given = Problem._make([*(x[:rows] for x in given[:-1]), given.sink_H])
    want = answer(given, table_of(segments), SCORE)
    # Heads before tokens, as partial rotary embeddings leave q and k.
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in given[:3])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        stock = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=SCORE.scale, enable_gqa=True
        )
    torch.autograd.grad(stock, (q, k, v), given.dout.transpose(1, 2))
    own_q, own_k, own_v = (x.detach().transpose(1, 2) for x in (q, k, v))
    out, lse = want.out.bfloat16(), want.lse.float()

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        held = BackwardInputs(dout, own_q, own_k, own_v, out, lse)
        return kernel.backward(held, segments, SCORE)

    inputs = [x.clone().requires_grad_() for x in (own_q, own_k, own_v)]
    grads = torch.autograd.grad(_Own.apply(backward, *inputs), inputs, given.dout)
    check(grads, (want.dq, want.dk, want.dv), 1e-2)


class Trial(NamedTuple):
    """A kernel, a case of `SEGMENTS`, and the tensors that it is tried with."""

    name: str
    case: str
    score: Score = SCORE
    dtype: torch.dtype = torch.bfloat16
    dim: int = 64
    heads: tuple[int, int] = (8, 2)


def check_segments(kernel: Kernel, trial: Trial) -> None:
    """Check forward over some keys, and their gradients where other keys and a sink count too."""
    _, case, score, dtype, dim, heads = trial
    segments = SEGMENTS[case]
    given = problem(sum(segments.q), sum(segments.kv), heads, dtype, dim=dim, device="cuda")
    want = answer(given, table_of(segments), score)
    check_kernel(kernel, segments, score, given, want, BOUND[dtype])


KINDS = (
    (torch.bfloat16, 64, (8, 2)),
    (torch.float16, 128, (8, 8)),
    (torch.bfloat16, 128, (7, 1)),
    (torch.float16, 64, (8, 2)),
)


def trials() -> Iterator[Trial]:
    """All cases, with the kinds of tensors in turn; then softcap, other head dims and float32."""
    for name, (number, case) in product(KERNELS, enumerate(SEGMENTS)):
        if takes(available()[name], SEGMENTS[case], SCORE):
            dtype, dim, heads = KINDS[number % len(KINDS)]
            yield Trial(name, case, Score(dim**-0.5), dtype, dim, heads)
    for case, dim in product(("causal", "full"), (136, 192, 256)):
        yield Trial("cudnn", case, Score(dim**-0.5), dim=dim)
    for name in PACKAGED:
        for case in ("causal", "full", "windows of documents", "documents"):
            yield Trial(name, case, CAPPED)
        for case, dim in product(("causal", "windows of documents"), (96, 192, 256)):
            yield Trial(name, case, Score(dim**-0.5), dim=dim)
    for case, score in product(SEGMENTS, (SCORE, CAPPED)):
        yield Trial("torch_eager", case, score, torch.float32)
    yield Trial("flex", "windows of documents", CAPPED)
    yield Trial("flex", "windows of documents", CAPPED, dim=256)
    yield Trial("flex", "window", dtype=torch.float32)
    yield from (Trial("flex", "table", score) for score in (SCORE, CAPPED))


@pytest.mark.parametrize("trial", list(trials()), ids=str)
def test_segments_windows_and_tables(trial: Trial) -> None:
    asked = {"dtype": trial.dtype, "head_dim": trial.dim, "softcap": trial.score is CAPPED}
    kernel = usable(trial.name, **asked) if trial.name in FAST else available()[trial.name]
    check_segments(kernel, trial)


@pytest.mark.parametrize("name", [*KERNELS, "flex"])
@pytest.mark.parametrize("case", ["causal", "windows of documents", "documents"])
def test_deterministic_gradients_are_bitwise_equal(name: str, case: str) -> None:
    """Segments are so long that sums over blocks could be made in any order."""
    kernel = usable(name, deterministic=True)
    segments = SEGMENTS[case]
    segments = segments._replace(
        q=tuple(9 * n for n in segments.q), kv=tuple(9 * n for n in segments.kv)
    )
    if not takes(kernel, segments, SCORE):
        pytest.skip(f"{name} has these taken apart")
    given = problem(
        sum(segments.q), sum(segments.kv), (8, 2), torch.bfloat16, dim=64, device="cuda"
    )
    q, k, v, dout = given[:4]
    out, lse = kernel.forward(q, k, v, segments, SCORE)
    inputs = BackwardInputs(dout, q, k, v, out, lse)
    first = kernel.backward(inputs, segments, SCORE)
    for _ in range(5):
        again = kernel.backward(inputs, segments, SCORE)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("name", [*KERNELS, "flex"])
def test_calls_keep_no_memory(name: str) -> None:
    kernel, segments = usable(name), SEGMENTS["causal"]
    given = problem(
        sum(segments.q), sum(segments.kv), (8, 2), torch.bfloat16, dim=64, device="cuda"
    )
    want = answer(given, table_of(segments), SCORE)
    taken = []
    for _ in range(4):  # the first calls may set up what later ones share
        check_kernel(kernel, segments, SCORE, given, want, BOUND[torch.bfloat16])
        taken.append(torch.cuda.memory_allocated())
    assert taken[-1] == taken[-2]


@pytest.mark.parametrize("changes", [{}, {"pieces": True}, {"softcap": True}])
def test_all_kernels_here_are_right_and_timed(changes: dict[str, bool]) -> None:
    """The probe finds no problem, and `auto` takes the fastest."""
    request = rounded(KernelRequest("cuda", torch.bfloat16, 128, **changes))
    names = measurable(request)
    if not names:
        pytest.skip("no kernel to measure can do this here")
    measured = measure([available()[name] for name in names], request)
    assert {name: one.problem for name, one in measured.items()} == dict.fromkeys(names)
    fastest = min(names, key=lambda name: measured[name].total_s)
    order, problems = preferred("auto", request, NO_CACHE, lambda kernels, asked: measured)
    assert order[0] == fastest
    assert not problems


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", PIECES)
def test_calls_add_up(name: str, case: str) -> None:
    """Pieces become windows, or squares in both directions where a kernel has no windows."""
    given = partial(problem, heads=(8, 2), dtype=torch.bfloat16, dim=64, device="cuda")
    check_calls(usable(name), PIECES[case], SCORE, given, 1e-2)


def test_auto_takes_the_usual_order_where_nothing_was_measured() -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128)
    for asked in (request, request._replace(pieces=True), request._replace(softcap=True)):
        kernels, chosen = available(), choose_kernel("auto", asked).name
        assert chosen == next(n for n in usual_order(asked) if kernels[n].refuses(asked) is None)
    assert choose_kernel("auto", request._replace(tiles=True)).name == "flex"
    assert choose_kernel("auto", request._replace(dtype=torch.float32)).name == "flex"


RUNS = [case for case, segments in SEGMENTS.items() if not isinstance(segments.rule, Tile)]


def test_flex_compiles_once_for_all_runs() -> None:
    """Lengths, windows, numbers of documents and scales are data, not code: nothing is recompiled.

    torch compiles two graphs: one for squares (in whole blocks), one for more columns than rows.
    """
    from torch._dynamo.utils import counters

    kernel = available()["flex"]
    for case in ("causal", "causal, more columns"):
        check_segments(kernel, Trial("flex", case))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    for case in RUNS:
        check_segments(kernel, Trial("flex", case, Score(0.1 + len(case) / 100)))
    assert counters["stats"]["unique_graphs"] == compiled
