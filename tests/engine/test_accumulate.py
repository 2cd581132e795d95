import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx_patch.engine.accumulate import Part, RowSum, SoftmaxMerge, fits_one_pass, out_specs
from longctx_patch.sequence.layout import Interval
from longctx_patch.transport import TensorSpec

CPU = torch.device("cpu")


def merge_of(*shape: int, dtype: torch.dtype = torch.float32) -> SoftmaxMerge:
    """An empty merge of outputs `[B, L, H, D]`."""
    return SoftmaxMerge(out_specs(TensorSpec(shape, dtype)), CPU)


def row_sum(*shape: int) -> RowSum:
    return RowSum([TensorSpec(shape, torch.bfloat16)], CPU)


def test_large_lse_does_not_overflow() -> None:
    """log(1 + exp(x)) would give infinite weights, a known fault of ring attention."""
    merge = merge_of(1, 2, 1, 1)
    rows = Interval(0, 2)
    merge.add(rows, (torch.tensor([1000.0, -1000.0]).view(1, 2, 1), torch.ones(1, 2, 1, 1)))
    merge.add(rows, (torch.full((1, 2, 1), 1000.0), torch.full((1, 2, 1, 1), 3.0)))
    lse, out = merge.result()
    assert out.flatten().tolist() == [2.0, 3.0]
    assert torch.isfinite(lse).all()


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    merge = merge_of(1, 3, 1, 1)
    unseen = torch.full((1, 1, 1), -torch.inf)
    first = torch.tensor([-torch.inf, 0.0]).view(1, 2, 1), torch.tensor([0.0, 5.0])
    merge.add(Interval(0, 2), (first[0], first[1].view(1, 2, 1, 1)))
    merge.add(Interval(0, 1), (unseen, torch.full((1, 1, 1, 1), 7.0)))
    lse, out = merge.result()
    assert out.flatten().tolist() == [0.0, 5.0, 0.0]
    assert lse.flatten().tolist() == [-torch.inf, 0.0, -torch.inf]


def test_nan_is_not_hidden() -> None:
    merge = merge_of(1, 2, 1, 1)
    merge.add(Interval(0, 2), (torch.zeros(1, 2, 1), torch.ones(1, 2, 1, 1)))
    merge.add(Interval(1, 2), (torch.full((1, 1, 1), torch.nan), torch.ones(1, 1, 1, 1)))
    for result in merge.result():
        assert result.isnan().flatten().tolist() == [False, True]


ROWS, MOST_PARTS = 11, 6


@st.composite
def row_runs(draw: st.DrawFn) -> list[Interval]:
    """The rows of several parts; every part, the first too, has some rows or all."""
    edges = st.integers(0, ROWS)
    some = st.tuples(edges, edges).map(lambda ends: Interval(min(ends), max(ends)))
    everything = st.just(Interval(0, ROWS))
    return draw(st.lists(st.one_of(some, everything), min_size=1, max_size=MOST_PARTS))


@settings(deadline=None)
@given(row_runs(), st.integers(0, 10**6))
def test_rows_of_one_part_keep_their_bits_and_others_are_rounded_once(
    runs: list[Interval], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = (2, ROWS, 3, 4)
    merge, total = merge_of(*whole, dtype=torch.bfloat16), row_sum(*whole)
    outs = torch.zeros(len(runs), *whole, dtype=torch.float64)
    all_lse = torch.full((len(runs), 2, 3, ROWS), -torch.inf, dtype=torch.float64)
    for index, rows in enumerate(runs):
        out = torch.randn(2, rows.size, 3, 4, generator=generator).bfloat16()
        lse = torch.randn(2, 3, rows.size, generator=generator)
        here = slice(rows.start, rows.stop)
        outs[index, :, here], all_lse[index, :, :, here] = out, lse
        merge.add(rows, (lse.transpose(1, 2), out.clone()))
        total.add(rows, (out.clone(),))
    weights = all_lse.softmax(0).nan_to_num(0.0)
    merged = torch.einsum("nbhl,nblhd->blhd", weights, outs)
    times = torch.tensor([sum(r.start <= row < r.stop for r in runs) for row in range(ROWS)])
    (lse, out), (sums,), (result,) = merge.result(), total.total(), total.result()
    assert sums.dtype == (torch.float32 if times.max() > 1 else torch.bfloat16)
    for found, wanted in ((out, merged), (result, outs.sum(0)), (sums, outs.sum(0))):
        once = times < 2
        assert torch.equal(found[:, once].double(), wanted[:, once])
        bound = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-20
        torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=1e-6)
    torch.testing.assert_close(
        lse.transpose(1, 2).double(), all_lse.logsumexp(0), rtol=1e-5, atol=1e-6
    )


def test_many_runs_become_one() -> None:
    """Rows that arrive one by one in any order, as documents of one call do, end as one part."""
    rows = 40
    merge, total = merge_of(1, rows, 1, 2, dtype=torch.bfloat16), row_sum(1, rows, 1, 2)
    ones = torch.ones(1, rows, 1, 2, dtype=torch.bfloat16)
    for row in torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist():
        here = Interval(row, row + 1)
        merge.add(here, (torch.zeros(1, 1, 1), row * ones[:, :1]))
        total.add(here, (row * ones[:, :1],))
    assert len(total._held) == rows
    for _ in range(2):
        merge.add(Interval(0, rows), (torch.zeros(1, rows, 1), 3 * ones))
        total.add(Interval(0, rows), (3 * ones,))
    assert [part.rows.size for part in total._held] == [rows]
    assert torch.equal(total.result()[0][0, :, 0, 0], torch.arange(6, 6 + rows).bfloat16())
    expected = ((torch.arange(rows) + 6) / 3).bfloat16()
    torch.testing.assert_close(merge.result()[1][0, :, 0, 0], expected)


def test_the_first_part_is_given_back_once_most_rows_have_several() -> None:
    total = row_sum(1, 8, 1, 2)
    first = torch.ones(1, 8, 1, 2, dtype=torch.bfloat16)
    total.add(Interval(0, 8), (first,))
    total.add(Interval(0, 4), (first[:, :4].clone(),))
    assert total.result()[0].data_ptr() == first.data_ptr()
    total.add(Interval(4, 5), (first[:, 4:5].clone(),))
    memory = {part.tensors[0].untyped_storage().data_ptr() for part in total._held}
    assert first.untyped_storage().data_ptr() not in memory
    assert total.result()[0][0, :, 0, 0].tolist() == [2, 2, 2, 2, 2, 1, 1, 1]


def test_totals_end_where_the_first_part_is() -> None:
    """The result is the first part's memory; only rows that have two parts take more."""
    whole = (1, 6, 2, 4)
    merge, total = merge_of(*whole, dtype=torch.bfloat16), row_sum(*whole)
    out, grad = (torch.ones(whole, dtype=torch.bfloat16) for _ in range(2))
    merge.add(Interval(0, 6), (torch.zeros(1, 6, 2), out))
    total.add(Interval(0, 6), (grad,))
    some = 3 * torch.ones(1, 2, 2, 4, dtype=torch.bfloat16)
    merge.add(Interval(1, 3), (torch.zeros(1, 2, 2), some))
    total.add(Interval(1, 3), (some.clone(),))
    assert merge.result()[1].data_ptr() == out.data_ptr()
    assert total.result()[0].data_ptr() == grad.data_ptr()
    assert out[0, :, 0, 0].tolist() == [1, 2, 2, 1, 1, 1]
    assert grad[0, :, 0, 0].tolist() == [1, 4, 4, 1, 1, 1]


def part(dtype: torch.dtype = torch.bfloat16, lse_dtype: torch.dtype = torch.float32) -> Part:
    lse_BLH, out_BLHD = torch.zeros(1, 4, 3, dtype=lse_dtype), torch.zeros(1, 4, 3, 8, dtype=dtype)
    return Part(Interval(0, 4), (lse_BLH, out_BLHD))


def test_one_pass_is_for_cuda_and_float32_totals() -> None:
    parts = [part(torch.bfloat16), part(torch.float16), part(torch.float32)]
    some_heads = Part(Interval(0, 4), tuple(x[:, :, 1:] for x in part().tensors))
    assert fits_one_pass("cuda", torch.float32, *parts, some_heads)
    assert not fits_one_pass("cpu", torch.float32, *parts)
    assert not fits_one_pass("cuda", torch.float64, *parts)
    assert not fits_one_pass("cuda", torch.float32, part(), part(torch.float64))
    assert not fits_one_pass("cuda", torch.float32, part(), part(lse_dtype=torch.float64))
    lse_BLH, out_BLHD = part().tensors
    every_other_number = Part(Interval(0, 4), (lse_BLH, out_BLHD[..., ::2]))
    assert not fits_one_pass("cuda", torch.float32, part(), every_other_number)


def test_sums_are_wide() -> None:
    like = torch.zeros(1, 2, 1, 1, dtype=torch.bfloat16)
    total = row_sum(1, 2, 1, 1)
    total.add(Interval(0, 2), (torch.full_like(like, 256),))
    for _ in range(4):
        total.add(Interval(0, 1), (torch.ones(1, 1, 1, 1, dtype=torch.bfloat16),))
    # bfloat16 can't represent 257, so sums in bfloat16 would lose every one of the ones.
    assert total.result()[0].flatten().tolist() == [260.0, 256.0]
