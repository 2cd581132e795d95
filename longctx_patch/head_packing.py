"""Between tensors with all heads and one buffer in which each rank's heads are side by side.

Heads of ranks that have equally many, equally far apart, are one strided copy: for even splits one
kernel for each tensor, however many ranks there are.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.layout import Interval

HeadCuts = tuple[Interval, ...]
"""Of one tensor, the heads of each rank."""


class HeadTotal(NamedTuple):
    """All heads of a tensor, as they come."""

    tensor: Tensor
    """`[B, L, heads, D]`"""
    is_sum: bool
    """Whether a head may come in several parts, which are added."""


def pack(tensors: Sequence[Tensor], cuts: tuple[HeadCuts, ...]) -> tuple[Tensor, list[int]]:
    """(flat buffer, numbers for each rank) of tensors `[B, L, heads, D]` of one dtype.

    A rank's part is `[B, L, heads of all tensors, D]`.
    """
    batch, rows, _, dim = tensors[0].shape
    sizes = [batch * rows * width * dim for width in _widths(cuts)]
    buffer = tensors[0].new_empty(sum(sizes))
    for stripe in _stripes(cuts):
        tensor = tensors[stripe.tensor]
        _copy(stripe.of_buffer(buffer, tensor.shape), stripe.of_tensor(tensor))
    return buffer, sizes


def unpack(buffer: Tensor, totals: Sequence[HeadTotal], cuts: tuple[HeadCuts, ...]) -> None:
    """The way back: the heads in `cuts` of each total, from what `pack` would have made of them."""
    for stripe in _stripes(cuts):
        tensor, is_sum = totals[stripe.tensor]
        arrived = stripe.of_buffer(buffer, tensor.shape)
        if not is_sum:
            _copy(stripe.of_tensor(tensor), arrived)
            continue
        for rank, of_rank in enumerate(arrived):  # one by one: they may have the same heads
            first = stripe.heads.start + rank * stripe.step
            tensor[:, :, first : first + stripe.heads.size] += of_rank


def are_shared(waves: Sequence[HeadCuts]) -> bool:
    """Whether some head is in the cuts of more than one rank, or of more than one wave."""
    cuts = sorted(cut for wave in waves for cut in wave)
    return any(a.stop > b.start for a, b in pairwise(cuts))


class _Stripe(NamedTuple):
    """Heads of one tensor that consecutive ranks have: equally many, equally far apart."""

    tensor: int
    num_ranks: int
    heads: Interval
    """Of the first of these ranks."""
    step: int
    """From the heads of one rank to those of the next."""
    width: int
    """Heads of all tensors that each rank has in the buffer."""
    before: int
    """Heads of the ranks before these in the buffer."""
    column: int
    """Heads of the tensors before this one."""

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """`[ranks, B, L, heads of a rank, D]` of `[B, L, all heads, D]`, without a copy."""
        batch, rows, _, dim = tensor.shape
        per_batch, per_row, per_head, per_number = tensor.stride()
        return tensor.as_strided(
            (self.num_ranks, batch, rows, self.heads.size, dim),
            (self.step * per_head, per_batch, per_row, per_head, per_number),
            tensor.storage_offset() + self.heads.start * per_head,
        )

    def of_buffer(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        """The same of the flat buffer, for a tensor of `shape`."""
        batch, rows, _, dim = shape
        per_row = self.width * dim
        return buffer.as_strided(
            (self.num_ranks, batch, rows, self.heads.size, dim),
            (batch * rows * per_row, rows * per_row, per_row, dim, 1),
            buffer.storage_offset() + (self.before * batch * rows + self.column) * dim,
        )


@lru_cache(maxsize=256)
def _stripes(cuts: tuple[HeadCuts, ...]) -> tuple[_Stripe, ...]:
    widths = _widths(cuts)
    before = [0, *accumulate(widths)]
    found = []
    for ranks in _regular_runs(cuts):
        column = 0
        for tensor, of_tensor in enumerate(cuts):
            heads = of_tensor[ranks.start]
            step = of_tensor[ranks.start + 1].start - heads.start if ranks.size > 1 else 0
            place = (widths[ranks.start], before[ranks.start], column)
            found.append(_Stripe(tensor, ranks.size, heads, step, *place))
            column += heads.size
    return tuple(found)


def _regular_runs(cuts: tuple[HeadCuts, ...]) -> list[Interval]:
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


@lru_cache(maxsize=256)
def _widths(cuts: tuple[HeadCuts, ...]) -> tuple[int, ...]:
    """Heads of each rank, of all tensors together."""
    return tuple(sum(cut.size for cut in of_rank) for of_rank in zip(*cuts, strict=True))


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy in the widest numbers that both are made of: a strided copy costs by the number."""
    unit = min(_unit_bytes(to), _unit_bytes(source))
    for wide in (torch.complex128, torch.int64, torch.int32):
        if unit >= wide.itemsize > to.dtype.itemsize:
            to, source = to.view(wide), source.view(wide)
            break
    to.copy_(source)


def _unit_bytes(tensor: Tensor) -> int:
    """The largest power of two that divides where the tensor and each of its rows begin."""
    if tensor.stride(-1) != 1:
        return 1
    numbers = reduce(or_, tensor.stride()[:-1], tensor.shape[-1] | int(tensor.storage_offset()))
    bits = tensor.data_ptr() | numbers * tensor.dtype.itemsize
    return bits & -bits
