import pytest
import torch

from longctx_patch.accumulate import (
    Part,
    RowSum,
    SoftmaxMerge,
    fits_one_pass,
)
from longctx_patch.layout import Interval
from longctx_patch.transport import TensorSpec

CPU = torch.device("cpu")


def spec(rows: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec((1, rows, 1, 1), dtype)


def test_one_block_is_adopted_bitwise() -> None:
    q = torch.randn(1, 6, 2, 4, dtype=torch.bfloat16)
    out, lse = torch.randn_like(q), torch.randn(1, 2, 6)
    merge = SoftmaxMerge(TensorSpec(tuple(q.shape), q.dtype), CPU)
    merge.add(Interval(0, 6), out, lse)
    found, found_lse = merge.result()
    assert torch.equal(found, out)
    assert torch.equal(found_lse, lse)


def test_large_lse_does_not_overflow() -> None:
    """Merging by log(1 + exp(x)) gave infinite weights here (a known fault of ring attention)."""
    merge = SoftmaxMerge(spec(2), CPU)
    rows = Interval(0, 2)
    merge.add(rows, torch.ones(1, 2, 1, 1), torch.tensor([[[1000.0, -1000.0]]]))
    merge.add(rows, torch.full((1, 2, 1, 1), 3.0), torch.tensor([[[1000.0, 1000.0]]]))
    out, lse = merge.result()
    assert out.flatten().tolist() == [2.0, 3.0]
    assert torch.isfinite(lse).all()


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    merge = SoftmaxMerge(spec(3), CPU)
    merge.add(Interval(1, 2), torch.full((1, 1, 1, 1), 5.0), torch.zeros(1, 1, 1))
    merge.add(Interval(0, 1), torch.full((1, 1, 1, 1), 7.0), torch.full((1, 1, 1), -torch.inf))
    out, lse = merge.result()
    assert out.flatten().tolist() == [0.0, 5.0, 0.0]
    assert lse.flatten().tolist() == [-torch.inf, 0.0, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ends", [[(0, 9), (0, 9), (2, 6)], [(1, 4), (3, 8), (0, 3), (5, 5)]])
def test_parts_of_any_rows_are_weighed_by_the_softmax_of_their_lse(
    ends: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    shape = (2, 9, 3, 5)
    merge = SoftmaxMerge(TensorSpec(shape, dtype), CPU)
    outs = torch.zeros(len(ends), *shape, dtype=torch.float64)
    all_lse = torch.full((len(ends), 2, 3, 9), -torch.inf, dtype=torch.float64)
    for index, (start, stop) in enumerate(ends):
        out = torch.randn(2, stop - start, 3, 5, dtype=dtype)
        lse = torch.randn(2, stop - start, 3, dtype=dtype).transpose(1, 2)
        outs[index, :, start:stop], all_lse[index, :, :, start:stop] = out, lse
        merge.add(Interval(start, stop), out, lse)
    found, found_lse = merge.result()
    weights = all_lse.softmax(0).nan_to_num(0.0)
    wanted = torch.einsum("nbhl,nblhd->blhd", weights, outs).to(dtype)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_lse, all_lse.logsumexp(0).to(dtype))


def test_nan_is_not_hidden() -> None:
    merge = SoftmaxMerge(spec(2), CPU)
    merge.add(Interval(0, 2), torch.ones(1, 2, 1, 1), torch.zeros(1, 1, 2))
    merge.add(Interval(1, 2), torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), torch.nan))
    for result in merge.result():
        assert result.isnan().flatten().tolist() == [False, True]


def test_one_block_of_some_rows_keeps_its_bits() -> None:
    merge = SoftmaxMerge(TensorSpec((1, 6, 2, 4), torch.bfloat16), CPU)
    out, lse = torch.randn(1, 3, 2, 4, dtype=torch.bfloat16), torch.randn(1, 2, 3)
    merge.add(Interval(2, 5), out, lse)
    found, found_lse = merge.result()
    assert torch.equal(found[:, 2:5], out)
    assert torch.equal(found_lse[:, :, 2:5], lse)
    assert found[:, [0, 1, 5]].abs().sum() == 0


def part(dtype: torch.dtype = torch.bfloat16, lse_dtype: torch.dtype = torch.float32) -> Part:
    out_BLHD, lse_BLH = torch.zeros(1, 4, 3, 8, dtype=dtype), torch.zeros(1, 4, 3, dtype=lse_dtype)
    return Part(Interval(0, 4), out_BLHD, lse_BLH.transpose(1, 2))


def test_one_pass_is_for_cuda_and_float32_totals() -> None:
    parts = [part(torch.bfloat16), part(torch.float16), part(torch.float32)]
    some_heads = part()._replace(out_BLHD=part().out_BLHD[:, :, 1:])
    assert fits_one_pass("cuda", torch.float32, *parts, some_heads)
    assert not fits_one_pass("cpu", torch.float32, *parts)
    assert not fits_one_pass("cuda", torch.float64, *parts)
    assert not fits_one_pass("cuda", torch.float32, part(), part(torch.float64))
    assert not fits_one_pass("cuda", torch.float32, part(), part(lse_dtype=torch.float64))
    every_other_number = part()._replace(out_BLHD=part().out_BLHD[..., ::2])
    assert not fits_one_pass("cuda", torch.float32, part(), every_other_number)


def test_sums_are_wide() -> None:
    like = torch.zeros(1, 2, 1, 1, dtype=torch.bfloat16)
    total = RowSum(spec(2, torch.bfloat16), CPU)
    total.add(Interval(0, 2), torch.full_like(like, 256))
    for _ in range(4):
        total.add(Interval(0, 1), torch.ones(1, 1, 1, 1, dtype=torch.bfloat16))
    # bfloat16 has no 257: summed in bfloat16 the ones would be lost one by one.
    assert total.result().flatten().tolist() == [260.0, 256.0]


def test_an_empty_sum_is_zero() -> None:
    assert RowSum(spec(2), CPU).result().abs().sum() == 0
