"""Heads for ranks: each is computed once, and packing puts every part in its place, in few copies,
in any layout and dtype."""

import pytest
import torch
from torch import Tensor

from longctx_patch.engine.head_packing import HeadTotal, are_shared, pack, unpack
from longctx_patch.plans.head_split import QKV, HeadSplit
from longctx_patch.sequence.layout import Interval

ROWS = 5


def numbers(batch: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """`[B, L, heads, D]`, with a different number in every entry."""
    return torch.arange(batch * ROWS * heads * dim).view(batch, ROWS, heads, dim).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor, which is what fused projections return."""
    return torch.cat([tensor, torch.zeros_like(tensor[:, :, :1])], 2)[:, :, :-1]


def one_by_one(tensors: list[Tensor], cuts: tuple[tuple[Interval, ...], ...]) -> Tensor:
    ranks = zip(*cuts, strict=True)
    parts = [
        torch.cat([t[:, :, slice(*cut)] for t, cut in zip(tensors, mine, strict=True)], 2).flatten()
        for mine in ranks
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (32, 32), (7, 7), (12, 4)])
@pytest.mark.parametrize("degree", [1, 2, 4, 5])
def test_every_head_is_computed_once(heads: int, kv_heads: int, degree: int) -> None:
    split = HeadSplit(heads, kv_heads, degree)
    assert sorted(head for cut in split.query for head in range(*cut)) == list(range(heads))
    for q, kv in zip(split.query, split.key_value, strict=True):
        assert {head * kv_heads // heads for head in range(*q)} == set(range(*kv))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (7, 1), (6, 6), (12, 4)])
@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_packed_as_one_by_one_and_back(batch: int, heads: int, kv_heads: int, degree: int) -> None:
    split = HeadSplit(heads, kv_heads, degree)
    tensors = [strided(numbers(batch, n, 4, torch.float32)) for n in (heads, kv_heads)]
    tensors.append(-tensors[1])
    cuts = tuple(split.of(kind) for kind in QKV)
    buffer, sizes = pack(tensors, cuts)
    assert torch.equal(buffer, one_by_one(tensors, cuts))
    assert sum(sizes) == buffer.numel()
    totals = [
        HeadTotal(torch.zeros_like(tensor), is_sum=are_shared(of_tensor))
        for tensor, of_tensor in zip(tensors, cuts, strict=True)
    ]
    unpack(buffer, totals, cuts)
    for tensor, (total, _), of_tensor in zip(tensors, totals, cuts, strict=True):
        times = torch.zeros(tensor.shape[2])
        for cut in of_tensor:
            times[slice(*cut)] += 1
        assert torch.equal(total, tensor * times[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 8, 20])
@pytest.mark.parametrize("offset", [0, 1])
def test_every_width_and_alignment(dtype: torch.dtype, dim: int, offset: int) -> None:
    """Copies, in wider numbers where size and alignment allow, are exact in both directions."""
    memory = torch.empty(offset + ROWS * 6 * dim, dtype=dtype)
    tensor = memory[offset:].view(1, ROWS, 6, dim).copy_(numbers(1, 6, dim, torch.float32) % 251)
    cuts = ((Interval(0, 2), Interval(2, 4), Interval(4, 6)),)
    buffer, _ = pack([tensor], cuts)
    assert torch.equal(buffer, one_by_one([tensor], cuts))
    back = torch.full_like(memory, -1)
    unpack(buffer, [HeadTotal(back[offset:].view_as(tensor), is_sum=False)], cuts)
    assert torch.equal(back[offset:], memory[offset:])


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_even_splits_are_one_copy_for_each_tensor(
    degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[torch.Size] = []
    copy = Tensor.copy_

    def counted(to: Tensor, source: Tensor) -> Tensor:
        copies.append(to.shape)
        return copy(to, source)

    monkeypatch.setattr(Tensor, "copy_", counted)
    split = HeadSplit(32, 8, degree)
    pack(
        [numbers(1, n, 8, torch.bfloat16) for n in (32, 8, 8)],
        tuple(split.of(kind) for kind in QKV),
    )
    assert [shape[0] for shape in copies] == [degree] * 3
