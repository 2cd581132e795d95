"""Between tensors with all heads and one buffer in which each rank's heads are side by side.

Heads of ranks that have equally many, equally far apart, are one strided copy: for even splits one
kernel for each tensor, however many ranks there are.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.layout import Interval

HeadCuts = Sequence[Interval]
"""Of one tensor, the heads of each rank."""


class Stripe(NamedTuple):
    """Heads of consecutive ranks that have equally many, equally far apart."""

    ranks: Interval
    heads: Interval
    """Of the first rank."""
    step: int
    """From the heads of one rank to those of the next."""

    def view(self, tensor: Tensor) -> Tensor:
        """`[ranks, B, L, heads of a rank, D]` of `[B, L, all heads, D]`, without a copy."""
        batch, rows, _, dim = tensor.shape
        per_batch, per_row, per_head, per_number = tensor.stride()
        return tensor.as_strided(
            (self.ranks.size, batch, rows, self.heads.size, dim),
            (self.step * per_head, per_batch, per_row, per_head, per_number),
            tensor.storage_offset() + self.heads.start * per_head,
        )


class HeadTotal(NamedTuple):
    """All heads of a tensor, as they come."""

    tensor: Tensor
    """`[B, L, heads, D]`"""
    is_sum: bool
    """Whether a head may come in several parts, which are added."""


def pack(tensors: Sequence[Tensor], cuts: Sequence[HeadCuts]) -> tuple[Tensor, list[int]]:
    """(flat buffer, numbers for each rank) of tensors `[B, L, heads, D]` of one dtype.

    A rank's part is `[B, L, heads of all tensors, D]`.
    """
    batch, rows, _, dim = tensors[0].shape
    sizes = [batch * rows * width * dim for width in _widths(cuts)]
    buffer = tensors[0].new_empty(sum(sizes))
    for index, stripe, part in _parts(buffer, (batch, rows, dim), cuts):
        _copy(part, stripe.view(tensors[index]))
    return buffer, sizes


def unpack(buffer: Tensor, totals: Sequence[HeadTotal], cuts: Sequence[HeadCuts]) -> None:
    """The way back: the heads in `cuts` of each total, from what `pack` would have made of them."""
    batch, rows, _, dim = totals[0].tensor.shape
    for index, stripe, part in _parts(buffer, (batch, rows, dim), cuts):
        tensor, is_sum = totals[index]
        if not is_sum:
            _copy(stripe.view(tensor), part)
            continue
        for rank, of_rank in enumerate(part):
            first = stripe.heads.start + rank * stripe.step
            tensor[:, :, first : first + stripe.heads.size] += of_rank


def are_shared(waves: Sequence[HeadCuts]) -> bool:
    """Whether some head is in the cuts of more than one rank, or of more than one wave."""
    cuts = sorted(cut for wave in waves for cut in wave)
    return any(a.stop > b.start for a, b in pairwise(cuts))


def _parts(
    buffer: Tensor, shape: tuple[int, int, int], cuts: Sequence[HeadCuts]
) -> Iterator[tuple[int, Stripe, Tensor]]:
    """(number of the tensor, its heads, `[ranks, B, L, heads, D]` of the buffer) of all parts."""
    batch, rows, dim = shape
    widths = _widths(cuts)
    starts = [0, *accumulate(batch * rows * width * dim for width in widths)]
    for ranks in _regular_runs(cuts):
        width = widths[ranks.start]
        run = buffer[starts[ranks.start] : starts[ranks.stop]]
        run = run.view(ranks.size, batch, rows, width, dim)
        first = 0
        for index, of_tensor in enumerate(cuts):
            mine = of_tensor[ranks.start : ranks.stop]
            step = mine[1].start - mine[0].start if len(mine) > 1 else 0
            yield index, Stripe(ranks, mine[0], step), run.narrow(3, first, mine[0].size)
            first += mine[0].size


def _regular_runs(cuts: Sequence[HeadCuts]) -> list[Interval]:
    """The ranks, in as few runs as are stripes in every tensor."""
    ranks = list(zip(*cuts, strict=True))
    steps = [None, *(_steps(*pair) for pair in pairwise(ranks))]
    runs = [Interval(0, 1)]
    for rank in range(1, len(ranks)):
        run = runs[-1]
        if steps[rank] is not None and (run.size == 1 or steps[rank] == steps[rank - 1]):
            runs[-1] = Interval(run.start, rank + 1)
        else:
            runs.append(Interval(rank, rank + 1))
    return runs


def _steps(before: HeadCuts, after: HeadCuts) -> tuple[int, ...] | None:
    """In each tensor from one rank's heads to the next one's; None if their numbers differ."""
    if any(a.size != b.size for a, b in zip(before, after, strict=True)):
        return None
    return tuple(b.start - a.start for a, b in zip(before, after, strict=True))


def _widths(cuts: Sequence[HeadCuts]) -> list[int]:
    """Heads of each rank, of all tensors together."""
    return [sum(cut.size for cut in of_rank) for of_rank in zip(*cuts, strict=True)]


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy in the widest numbers that both are made of: a strided copy costs by the number."""
    for wide in (torch.complex128, torch.int64, torch.int32):
        if all(_is_made_of(wide.itemsize, x) for x in (to, source)):
            to, source = to.view(wide), source.view(wide)
            break
    to.copy_(source)


def _is_made_of(width: int, tensor: Tensor) -> bool:
    """Whether its rows are runs of `width` bytes that begin at multiples of it."""
    own = tensor.dtype.itemsize
    numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    starts_well = tensor.stride(-1) == 1 and tensor.data_ptr() % width == 0
    return starts_well and all(number * own % width == 0 for number in numbers)
