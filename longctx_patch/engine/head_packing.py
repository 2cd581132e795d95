"""Copies between tensors with all heads and one buffer in which each rank's heads are together.

One strided copy serves all ranks whose heads are equally many and equally far apart: for even
splits that is one kernel per tensor, however many ranks there are. Tensors are copied as the widest
dtype that their alignment allows, since a copy costs by the number of elements. Where heads go is
cached for tensors of one memory layout: for short rows, working it out takes the host longer than
attention takes the GPU.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.sequence.layout import Interval

_WIDEST = torch.complex128
_WIDE = (_WIDEST, torch.int64, torch.int32)

HeadCuts = tuple[Interval, ...]
"""The heads that each rank has of one tensor."""


class HeadTotal(NamedTuple):
    """Memory into which all heads of a tensor are put as they come."""

    tensor: Tensor
    """Its shape is `[B, L, heads, D]`."""
    is_sum: bool
    """True if a head may come in several parts, which are added."""


def pack(tensors: Sequence[Tensor], cuts: tuple[HeadCuts, ...]) -> tuple[Tensor, list[int]]:
    """Pack tensors `[B, L, heads, D]` of one dtype: (flat buffer, how many numbers for each rank).

    A rank's part is `[B, L, heads of all tensors, D]`.
    """
    batch, rows, _, dim = tensors[0].shape
    sizes = [batch * rows * width * dim for width in _widths(cuts)]
    buffer = tensors[0].new_empty(sum(sizes))
    for copy in _copies(cuts, tuple(_form(tensor) for tensor in tensors), _form(buffer)):
        mine, packed = copy.views(tensors[copy.tensor], buffer)
        packed.copy_(mine)
    return buffer, sizes


def unpack(buffer: Tensor, totals: Sequence[HeadTotal], cuts: tuple[HeadCuts, ...]) -> None:
    """Fill the heads in `cuts` of each total from a buffer in the form that `pack` makes."""
    forms = tuple(_form(tensor, is_copied=not is_sum) for tensor, is_sum in totals)
    for copy in _copies(cuts, forms, _form(buffer)):
        tensor, is_sum = totals[copy.tensor]
        mine, packed = copy.views(tensor, buffer)
        if not is_sum:
            mine.copy_(packed)
            continue
        for of_rank, arrived in zip(mine, packed, strict=True):  # ranks may share heads
            of_rank += arrived


@lru_cache(maxsize=256)
def are_shared(cuts: HeadCuts) -> bool:
    """Says whether some head is in the cuts of more than one rank."""
    return any(a.stop > b.start for a, b in pairwise(sorted(cuts)))


class _Form(NamedTuple):
    """A tensor's place in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """The place of its first number in the storage."""
    address: int
    """The address of its first number, in bytes modulo the size of the widest numbers."""
    dtype: torch.dtype
    is_copied: bool
    """False where numbers are added, which needs their own dtype."""

    @property
    def unit_bytes(self) -> int:
        """The largest power of two that divides the addresses of the tensor and of its rows."""
        if self.strides[-1] != 1:
            return 1
        numbers = reduce(or_, self.strides[:-1], self.shape[-1] | self.offset)
        bits = _WIDEST.itemsize | self.address | numbers * self.dtype.itemsize
        return bits & -bits


def _form(tensor: Tensor, *, is_copied: bool = True) -> _Form:
    offset, address = int(tensor.storage_offset()), tensor.data_ptr() % _WIDEST.itemsize
    return _Form(tensor.shape, tensor.stride(), offset, address, tensor.dtype, is_copied)


class _Copy(NamedTuple):
    """A copy between heads of a tensor and their place in the buffer, both as strided views."""

    tensor: int
    wide: torch.dtype | None
    """The dtype that both are viewed as; None: their own."""
    shape: tuple[int, ...]
    """The shape of both views: `[ranks, B, L, heads of a rank, D]`."""
    in_tensor: tuple[tuple[int, ...], int]
    """Strides and offset."""
    in_buffer: tuple[tuple[int, ...], int]

    def views(self, tensor: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        if self.wide is not None:
            tensor, buffer = tensor.view(self.wide), buffer.view(self.wide)
        return (
            tensor.as_strided(self.shape, *self.in_tensor),
            buffer.as_strided(self.shape, *self.in_buffer),
        )


@lru_cache(maxsize=1024)
def _copies(
    cuts: tuple[HeadCuts, ...], forms: tuple[_Form, ...], buffer: _Form
) -> tuple[_Copy, ...]:
    """One copy for each run of ranks whose heads are equally many and equally far apart."""
    widths = _widths(cuts)
    before = [0, *accumulate(widths)]
    found = []
    for ranks in _regular_runs(cuts):
        column = 0
        for number, (of_tensor, form) in enumerate(zip(cuts, forms, strict=True)):
            heads = of_tensor[ranks.start]
            step = of_tensor[ranks.start + 1].start - heads.start if ranks.size > 1 else 0
            batch, rows, _, dim = form.shape
            per_batch, per_row, per_head, per_number = form.strides
            in_tensor = (step * per_head, per_batch, per_row, per_head, per_number)
            first = form.offset + heads.start * per_head
            width = widths[ranks.start] * dim
            in_buffer = (batch * rows * width, rows * width, width, dim, 1)
            place = buffer.offset + (before[ranks.start] * batch * rows + column) * dim
            wide = _wide(form, buffer)
            numbers = 1 if wide is None else wide.itemsize // form.dtype.itemsize
            found.append(
                _Copy(
                    number,
                    wide,
                    (ranks.size, batch, rows, heads.size, dim // numbers),
                    (_in_units(in_tensor, numbers), first // numbers),
                    (_in_units(in_buffer, numbers), place // numbers),
                )
            )
            column += heads.size
    return tuple(found)


def _wide(form: _Form, buffer: _Form) -> torch.dtype | None:
    """The widest dtype that both can be viewed as; None: their own."""
    if not form.is_copied or form.dtype != buffer.dtype:
        return None
    # In the buffer a row is the D numbers of one head, as in the tensor.
    unit = min(form.unit_bytes, buffer._replace(shape=form.shape[-1:]).unit_bytes)
    wider = (x for x in _WIDE if unit >= x.itemsize > form.dtype.itemsize)
    return next(wider, None)


def _in_units(strides: tuple[int, ...], numbers: int) -> tuple[int, ...]:
    """Strides counted in wider numbers, which are contiguous along the last dim."""
    *others, last = strides
    return (*(stride // numbers for stride in others), last)


def _regular_runs(cuts: tuple[HeadCuts, ...]) -> list[Interval]:
    """The ranks, in as few runs as are evenly spaced in every tensor."""
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
    """The distance from one rank's heads to the next one's in each tensor; None if sizes differ."""
    if any(a.size != b.size for a, b in zip(before, after, strict=True)):
        return None
    return tuple(b.start - a.start for a, b in zip(before, after, strict=True))


@lru_cache(maxsize=256)
def _widths(cuts: tuple[HeadCuts, ...]) -> tuple[int, ...]:
    """The number of heads that each rank has, of all tensors together."""
    return tuple(sum(cut.size for cut in of_rank) for of_rank in zip(*cuts, strict=True))
