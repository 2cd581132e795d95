import torch

from longctx_patch.accumulate import RowSum, SoftmaxMerge
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
