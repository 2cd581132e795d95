"""The merge in one pass: at most twice the error of torch's operators, and no extra memory."""

import pytest
import torch
from torch import Tensor

from longctx_patch.engine import accumulate
from longctx_patch.engine.accumulate import (
    Part,
    SoftmaxMerge,
    fits_one_pass,
    merge_in_place,
    out_specs,
)
from longctx_patch.sequence.layout import Interval
from longctx_patch.transport import TensorSpec
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS = 2, 101, 3
EVERY = Interval(0, LENGTH)
DEVICE = "cuda"


def spec(dim: int) -> TensorSpec:
    return TensorSpec((BATCH, LENGTH, HEADS, dim), torch.float32)


def some_part(rows: Interval, dim: int, dtype: torch.dtype, seed: int) -> Part:
    """Views of larger tensors; head 0 has rows that see no key, head 1 some far larger lse."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (BATCH, rows.size, HEADS + 1, 2 * dim)
    out = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)[:, :, 1:, :dim]
    lse_BLH = 3 * torch.randn(shape[:3], generator=generator, device=DEVICE)[:, :, 1:]
    lse_BLH[:, seed % 3 :: 3, 0] = -torch.inf
    lse_BLH[:, seed % 2 :: 5, 1] += 500.0
    out.mul_((lse_BLH > -torch.inf)[..., None])
    return Part(rows, (lse_BLH, out))


def merged(parts: list[Part], dim: int) -> tuple[Tensor, Tensor]:
    merge = SoftmaxMerge(out_specs(spec(dim)), torch.device(DEVICE))
    for part in parts:
        merge.add(*part)
    lse_BLH, out = merge.result()
    return out, lse_BLH.transpose(1, 2)


def softmax_of(parts: list[Part], dim: int) -> tuple[Tensor, Tensor]:
    """(out_BLHD, lse_BHL) in float64: the parts weighted by the softmax of their lse."""
    lse_NBHL = torch.full((len(parts), BATCH, HEADS, LENGTH), -torch.inf, device=DEVICE).double()
    out_NBLHD = torch.zeros(len(parts), *spec(dim).shape, device=DEVICE).double()
    for index, (rows, (lse_BLH, out)) in enumerate(parts):
        lse_NBHL[index, :, :, rows.start : rows.stop] = lse_BLH.transpose(1, 2)
        out_NBLHD[index, :, rows.start : rows.stop] = out
    weight_NBHL = torch.softmax(lse_NBHL, 0).nan_to_num(0.0)
    return torch.einsum("nbhl,nblhd->blhd", weight_NBHL, out_NBLHD), lse_NBHL.logsumexp(0)


@pytest.mark.parametrize("dim", [8, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "rows",
    [
        [EVERY, EVERY, Interval(20, LENGTH)],
        [Interval(7, 50), Interval(40, 99), EVERY, Interval(3, 4)],
        [Interval(60, 90), Interval(0, 30), Interval(30, 30)],
    ],
)
def test_error_is_at_most_twice_that_of_several_passes(
    rows: list[Interval], dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts() -> list[Part]:  # made anew for each merge, which may write to them
        return [some_part(part_rows, dim, dtype, seed) for seed, part_rows in enumerate(rows)]

    assert fits_one_pass(DEVICE, torch.float32, *parts())
    found, wanted = merged(parts(), dim), softmax_of(parts(), dim)
    monkeypatch.setattr(accumulate, "runs_triton", lambda: False)
    several = merged(parts(), dim)
    seen = wanted[1] > -torch.inf
    assert torch.equal(found[1] == -torch.inf, ~seen)
    assert not found[0].transpose(1, 2)[~seen].any()
    assert relative_error(found[0], wanted[0]) <= 2 * relative_error(several[0], wanted[0]) + 1e-7
    of_several = relative_error(several[1][seen], wanted[1][seen])
    assert relative_error(found[1][seen], wanted[1][seen]) <= 2 * of_several + 1e-7


@pytest.mark.parametrize("dim", [8, 128, 256])
def test_in_place_gives_the_bits_of_new_memory_each_time(dim: int) -> None:
    from longctx_patch.engine.fused_merge import merge

    old, new = (some_part(EVERY, dim, torch.float32, seed) for seed in range(2))
    total = Part(EVERY, tuple(torch.empty_like(x) for x in old.tensors))
    merge(total, old, new)
    for _ in range(20):
        copy = Part(EVERY, tuple(x.clone() for x in old.tensors))
        merge(copy, copy, new)
        assert all(map(torch.equal, copy.tensors, total.tensors))


def test_takes_the_memory_of_rows_with_several_parts_alone() -> None:
    shape, device = (1, 4096, 8, 128), torch.device(DEVICE)
    lse = torch.zeros(1, 8, 4096, device=DEVICE).transpose(1, 2)
    part = torch.ones(shape, device=DEVICE, dtype=torch.bfloat16)
    merge = SoftmaxMerge(out_specs(TensorSpec(shape, torch.bfloat16)), device)
    half = Interval(0, 2048)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    merge.add(half, (lse[:, :2048], part[:, :2048]))
    merge.add(Interval(1024, 4096), (lse[:, 1024:], part[:, 1024:]))
    merge.add(half, (lse[:, :2048], part[:, :2048]))
    # Only the first half of the rows has a float32 sum.
    assert torch.cuda.max_memory_allocated() - before == (4 * part.numel() + lse.nbytes) // 2
    _, out = merge.result()
    assert torch.equal(out, part)


@pytest.mark.parametrize("far", ["batch", "row", "head"])
def test_numbers_beyond_two_to_the_31(far: str) -> None:
    strides = {"batch": 256, "row": 64, "head": 16} | {far: 2**31 + 64}
    memory = torch.empty(2**31 + 512, device=DEVICE)
    out = memory.as_strided((2, 2, 2, 16), (*strides.values(), 1))
    out.copy_(torch.randn(out.shape, device=DEVICE))
    rows = Interval(0, 2)
    lse = torch.randn(2, 2, 2, device=DEVICE)
    old = Part(rows, (lse, out))
    new = Part(rows, (torch.randn_like(lse), torch.randn(out.shape, device=DEVICE)))
    wanted = Part(rows, (lse.clone(), out.clone()))
    merge_in_place(wanted, new)
    merge = SoftmaxMerge(out_specs(TensorSpec(tuple(out.shape), out.dtype)), torch.device(DEVICE))
    merge.add(*old)
    merge.add(*new)
    assert merge.result()[1].data_ptr() == out.data_ptr()
    torch.testing.assert_close(old.tensors, wanted.tensors)


def test_nan_is_not_hidden() -> None:
    old, new = (some_part(EVERY, 8, torch.bfloat16, seed) for seed in range(2))
    new.tensors[0][0, :3, 0] = torch.nan
    out, lse = merged([old, new], 8)
    assert lse[0, 0, :3].isnan().all()
    assert out[0, :3, 0].isnan().all()
    assert lse.isnan().sum() == 3
