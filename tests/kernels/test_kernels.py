"""Every kernel that runs on a CPU agrees with attention over a whole table in float64."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.kernels import (
    Kernel,
    Score,
    Segments,
    Window,
    available,
    run,
)
from longctx_patch.kernels.backends.dense import DenseKernel
from longctx_patch.kernels.backends.flex import FlexKernel
from longctx_patch.kernels.backends.flex_masks import block_mask
from longctx_patch.sequence.layout import even_cuts
from tests.kernels.cases import PIECES, SEGMENTS
from tests.kernels.checks import check_calls, check_kernel, takes
from tests.kernels.dense import answer, problem, table_of
from tests.kernels.fakes import fake_kernels, flash_attn_3_ops

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
CAPPED = Score(0.3, softcap=0.7)
PLAIN = Score(0.3)


def attend_densely(
    q_BHLD: Tensor, k_BGMD: Tensor, v_BGMD: Tensor, mask: Any, score: Score
) -> tuple[Tensor, Tensor]:
    """What FlexAttention computes from a block mask, in plain torch operations."""
    rows, columns = (torch.arange(x.shape[2]) for x in (q_BHLD, k_BGMD))
    bits_LM = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], columns[None])
    in_block_LM = mask.to_dense()[0, 0].bool().repeat_interleave(128, 0).repeat_interleave(128, 1)
    group = q_BHLD.shape[1] // k_BGMD.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k_BGMD, v_BGMD))
    scores = q_BHLD @ k.mT * score.scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    hidden_LM = ~(bits_LM & in_block_LM)
    scores = scores.masked_fill(hidden_LM, -torch.inf)
    p = torch.where(hidden_LM.all(1)[:, None], 0.0, scores.softmax(-1))
    return (p @ v.to(p.dtype)).to(v.dtype), scores.logsumexp(-1)


KERNELS: dict[str, Kernel] = {
    "reference": available()["reference"],
    "torch_eager": available()["torch_eager"],
    "torch_eager, a row at a time": DenseKernel("torch_eager", None, chunk_bytes=1),
    "torch_eager, in chunks": DenseKernel("torch_eager", None, chunk_bytes=2**12),
    "torch_cpu": available()["torch_cpu"],
    "flex": FlexKernel(attend_densely),
    **fake_kernels(),
}
PACKAGED = list(fake_kernels())


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    with flash_attn_3_ops():
        yield


FORMS = [
    ((6, 2), torch.float64),
    ((4, 4), torch.float32),
    ((4, 1), torch.bfloat16),
]
HALF_FORMS = [((6, 2), torch.float16), ((4, 1), torch.bfloat16)]


def forms_of(name: str) -> list[tuple[tuple[int, int], torch.dtype]]:
    """(heads, dtype) pairs to try; kernels that differ only in how they cut rows get one."""
    return FORMS[:1] if "," in name else HALF_FORMS if name in PACKAGED else FORMS


def taken() -> Iterator[tuple[str, str, Score, tuple[int, int], torch.dtype]]:
    """Each kernel with each case in one form; forms and softcaps take turns over the cases."""
    for (name, kernel), (number, case) in product(KERNELS.items(), enumerate(SEGMENTS)):
        if "," in name and "many" in case:
            continue
        scores = [score for score in (PLAIN, CAPPED) if takes(kernel, SEGMENTS[case], score)]
        if scores:
            forms = forms_of(name)
            score = scores[number // len(forms) % len(scores)]
            yield name, case, score, *forms[number % len(forms)]


@pytest.mark.parametrize(("name", "case", "score", "heads", "dtype"), list(taken()))
def test_against_a_whole_table(
    name: str, case: str, score: Score, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Forward over some keys is right, and so are gradients where other keys and a sink count."""
    kernel, segments = KERNELS[name], SEGMENTS[case]
    given = problem(sum(segments.q), sum(segments.kv), heads, dtype)
    want = answer(given, table_of(segments), score)
    check_kernel(kernel, segments, score, given, want, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        # torch_eager has all traits like reference and flex, torch_cpu none but tables.
        for name in ("torch_eager", "torch_cpu", "flash_attn_4")
        for case in PIECES
        if KERNELS[name].traits.tiles or "tables" not in case
    ],
)
def test_calls_add_up(name: str, case: str) -> None:
    """Outputs of calls merged by lse, and gradients added, are exact, as the executor does it."""
    dtype = torch.float16 if name in PACKAGED else torch.float64
    given = partial(problem, heads=(6, 2), dtype=dtype)
    check_calls(KERNELS[name], PIECES[case], PLAIN, given, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in ("flex", "torch_cpu", *PACKAGED)
        for case in ("documents", "overlapping rows")
    ],
)
def test_heads_after_each_other_add_up(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three key-value heads that are computed in two parts give the same gradients."""
    monkeypatch.setattr(run, "num_head_parts", lambda q, k: 2)
    dtype = torch.float16 if name in PACKAGED else torch.float64
    given = partial(problem, heads=(6, 3), dtype=dtype)
    check_calls(KERNELS[name], PIECES[case], PLAIN, given, TOLERANCE[dtype])


@pytest.mark.parametrize("name", KERNELS)
def test_calls_leave_no_tensors_behind(name: str) -> None:
    """A call's graph goes with the call, whatever its operations save."""
    kernel, segments = KERNELS[name], SEGMENTS["causal"]
    dtype = torch.float16 if name in PACKAGED else torch.float64
    given = problem(sum(segments.q), sum(segments.kv), (6, 2), dtype)
    want = answer(given, table_of(segments), PLAIN)
    alive = []
    for _ in range(3):  # the first call may make what later ones share
        check_kernel(kernel, segments, PLAIN, given, want, TOLERANCE[dtype])
        gc.collect()
        alive.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert alive[1] == alive[2]


def test_heads_go_together_while_dq_is_small() -> None:
    device = 140 * 2**30
    for tokens, heads, parts in ((2**18, 32, 1), (2**20, 8, 1), (2**20, 32, 3), (3 * 2**19, 32, 4)):
        assert run.parts_that_fit(tokens * heads * 128, device, 8) == parts
    most = min(run.MOST_NUMBERS, run.SHARE * device / 4)
    for tokens, kv_heads in product(range(2**19, 2**22, 12345), (1, 2, 3, 4, 8, 32)):
        of_a_head = tokens * 128 * 32 // kv_heads
        count = run.parts_that_fit(of_a_head * kv_heads, device, kv_heads)
        largest = max(cut.size for cut in even_cuts(kv_heads, count))
        assert of_a_head * largest <= most or count == kv_heads
        if count > 1:  # one fewer would be too few
            fewer = max(cut.size for cut in even_cuts(kv_heads, count - 1))
            assert of_a_head * fewer > most
    assert run.parts_that_fit(2**40, device, 8) == 8
    assert run.parts_that_fit(2**31, 2**40, 8) == 2
    assert run.num_head_parts(torch.empty(1, 4, 8, 16), torch.empty(1, 4, 2, 16)) == 1


def test_a_long_window_in_chunks_takes_few_products() -> None:
    """A chunk of rows computes only the columns that it can see, not the whole segment."""
    kernel = DenseKernel("torch_eager", None, chunk_bytes=2**20)
    segments = Segments((8192,), (8192,), Window(31, 0))
    q = torch.zeros(1, 8192, 1, 8)
    chunks = list(kernel._chunks(q, segments))
    computed = sum((r.stop - r.start) * (c.stop - c.start) for r, c, _ in chunks)
    assert computed * 4 / len(chunks) <= 2**20
    assert len(chunks) < 30
    out, _ = kernel.forward(q, q, torch.arange(8192.0)[None, :, None, None] + q, segments, PLAIN)
    assert out[0, 100, 0, 0] == pytest.approx(100 - 15.5)


@pytest.mark.parametrize("case", SEGMENTS)
def test_block_masks_are_those_of_torch(case: str) -> None:
    """Blocks and table equal those that `create_block_mask` makes from the same function."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments = SEGMENTS[case]
    made = block_mask(segments, torch.device("cpu"))
    lengths = made.seq_lengths
    torchs = create_block_mask(made.mask_mod, None, None, *lengths, device="cpu")
    assert torch.equal(made.to_dense(), torchs.to_dense())
    for counts in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, counts), getattr(torchs, counts))
    rows, columns = (torch.arange(n) for n in lengths)
    bits = made.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], columns[None])
    wanted = torch.zeros(lengths, dtype=torch.bool)
    wanted[: sum(segments.q), : sum(segments.kv)] = table_of(segments)
    assert torch.equal(bits, wanted)
