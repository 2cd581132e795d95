"""Totals of partial results, in float32 or wider: each contribution is rounded once at most.

Rows that have one part only stay as they came, bit for bit. In a packed row most rows do, and
totals of all would cost more than the exchange of the few keys that travel.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cache
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from longctx_patch.kernels.installed import runs_triton
from longctx_patch.sequence.layout import Interval
from longctx_patch.transport import TensorSpec


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


class _RowPart(Protocol):
    """What is held for some rows: an attention output, or a gradient."""

    @property
    def rows(self) -> Interval: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cut(self, rows: Interval) -> Self:
        """A view of some of its rows."""
        ...

    def copy_(self, other: Self) -> None:
        """Take the numbers of another one of the same rows."""
        ...

    def copied(self, dtype: torch.dtype) -> Self:
        """Its numbers in memory of their own."""
        ...


P = TypeVar("P", bound=_RowPart)

MOST_AT_ONCE = 16
"""A part is added to at most this many runs of rows one by one; else all rows become one run."""


class _RowTotals(ABC, Generic[P]):
    """Parts are kept, and may be written to."""

    def __init__(self, spec: TensorSpec, device: torch.device) -> None:
        """`spec`: of the total, rows along dim 1."""
        self.spec = spec
        self._device = device
        self._wide = sum_dtype(spec.dtype)
        self._held: list[P] = []
        """Disjoint rows in their order, each one part as it came or the wide total of several."""
        self._home: P | None = None
        """The first part, where it has all rows and still holds most of them: in the end the totals
        of the others are written there too."""
        self._at_home = 0
        """How many rows it still holds."""

    @abstractmethod
    def _empty(self, rows: Interval, dtype: torch.dtype) -> P:
        """Memory for some rows."""

    @abstractmethod
    def _clear(self, part: P) -> None:
        """Fill it with what rows without any part have."""

    @abstractmethod
    def _joined(self, old: P, new: P) -> P:
        """The wide total of two parts of the same rows: in the memory of `old` if that is wide."""

    def _add(self, new: P) -> None:
        if not new.rows.size:
            return
        if not self._held and new.rows == self._all_rows and new.dtype != self._wide:
            self._home, self._at_home = new, new.rows.size
        first, last = self._those_in(new.rows)
        if last - first > MOST_AT_ONCE:
            self._held, self._home = [self._whole(self._wide)], None
            first, last = 0, 1
        self._held[first:last] = list(self._with(self._held[first:last], new))
        if self._home is not None and 2 * self._at_home < self._all_rows.size:
            self._leave_home()

    def _with(self, held: list[P], new: P) -> Iterator[P]:
        """What takes the place of the held parts that share rows with a new one."""
        at = new.rows.start
        for old in held:
            both = old.rows.intersect(new.rows)
            if at < both.start:
                yield new.cut(Interval(at, both.start))
            at = both.stop
            total = self._joined(old.cut(both), new.cut(both))
            if old.dtype == self._wide:
                yield old
                continue
            self._at_home -= both.size
            yield from (old.cut(rest) for rest in old.rows.without(both) if rest.start < at)
            yield total
            yield from (old.cut(rest) for rest in old.rows.without(both) if rest.start >= at)
        if at < new.rows.stop:
            yield new.cut(Interval(at, new.rows.stop))

    def _those_in(self, rows: Interval) -> tuple[int, int]:
        """The range of the held parts that share rows with these."""
        first = bisect_right(self._held, rows.start, key=lambda part: part.rows.stop)
        return first, bisect_left(self._held, rows.stop, first, key=lambda part: part.rows.start)

    def _leave_home(self) -> None:
        """Give the first part's memory back: what is held there is copied."""
        self._home = None
        self._held = [
            part if part.dtype == self._wide else part.copied(part.dtype) for part in self._held
        ]

    def _whole(self, dtype: torch.dtype) -> P:
        """All rows in one dtype."""
        if len(self._held) == 1 and (only := self._held[0]).rows == self._all_rows:
            return only if only.dtype == dtype else only.copied(dtype)
        if self._home is not None and self._home.dtype == dtype:
            for part in self._held:
                if part.dtype != dtype:
                    self._home.cut(part.rows).copy_(part)
            return self._home
        whole = self._empty(self._all_rows, dtype)
        self._write_to(whole)
        return whole

    def _write_to(self, whole: P) -> None:
        """Put all rows into other memory."""
        if sum(part.rows.size for part in self._held) < self._all_rows.size:
            self._clear(whole)
        for part in self._held:
            whole.cut(part.rows).copy_(part)

    @property
    def _all_rows(self) -> Interval:
        return Interval(0, self.spec.shape[1])


class Part(NamedTuple):
    """The attention of some rows over some keys; lse is -inf for a row without any key."""

    rows: Interval
    """Which rows of the whole; out and lse hold these alone."""
    out_BLHD: Tensor
    lse_BHL: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.out_BLHD.dtype

    def cut(self, rows: Interval) -> "Part":
        if rows == self.rows:
            return self
        here = _slice(self.rows, rows)
        return Part(rows, self.out_BLHD[:, here], self.lse_BHL[:, :, here])

    def copy_(self, other: "Part") -> None:
        self.out_BLHD.copy_(other.out_BLHD)
        self.lse_BHL.copy_(other.lse_BHL)

    def copied(self, dtype: torch.dtype) -> "Part":
        return Part(self.rows, _copied(self.out_BLHD, dtype), _copied(self.lse_BHL))


class SoftmaxMerge(_RowTotals[Part]):
    """Merges attention over key blocks by their log-sum-exp (FlashAttention, section 3.1)."""

    def add(self, rows: Interval, out_BLHD: Tensor, lse_BHL: Tensor) -> None:
        """Merge a part that covers `rows`. It is kept, and may be written to."""
        self._add(Part(rows, out_BLHD, lse_BHL))

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BLHD in its dtype, lse_BHL); zeros and -inf for rows that saw no key."""
        _, out_BLHD, lse_BHL = self._whole(self.spec.dtype)
        return out_BLHD, lse_BHL

    def write_to(self, out_BLHD: Tensor, lse_BHL: Tensor) -> None:
        """Put the result into other memory."""
        self._write_to(Part(self._all_rows, out_BLHD, lse_BHL))

    def _joined(self, old: Part, new: Part) -> Part:
        total = old if old.dtype == self._wide else self._empty(old.rows, self._wide)
        if fits_one_pass(self._device.type, self._wide, old, new) and runs_triton():
            from longctx_patch.engine.fused_merge import merge  # imports triton

            merge(total, old, new)
            return total
        if total is not old:
            total.copy_(old)
        merge_in_place(total, new)
        return total

    def _empty(self, rows: Interval, dtype: torch.dtype) -> Part:
        batch, _, heads, dim = self.spec.shape
        out_BLHD = torch.empty(batch, rows.size, heads, dim, dtype=dtype, device=self._device)
        lse_BHL = torch.empty(batch, heads, rows.size, dtype=self._wide, device=self._device)
        return Part(rows, out_BLHD, lse_BHL)

    def _clear(self, part: Part) -> None:
        part.out_BLHD.zero_()
        part.lse_BHL.fill_(-torch.inf)


def merge_in_place(total: Part, new: Part) -> None:
    """Merge a part into the same rows of a total, by torch's own operators.

    A row without any key has lse -inf, and weighs 0 also where both sides have none and their
    difference is NaN. NaN from elsewhere stays.
    """
    # The difference of two lse is exact where it matters, so the weights add up to one however
    # large lse is; exp(lse - logaddexp) would carry the rounding of the sum into both.
    weight_BHL = torch.sigmoid(new.lse_BHL - total.lse_BHL)
    weight_BHL.masked_fill_(new.lse_BHL == -torch.inf, 0.0)
    out_BLHD = new.out_BLHD.to(total.out_BLHD.dtype)
    total.out_BLHD.lerp_(out_BLHD, weight_BHL.transpose(1, 2)[..., None])
    torch.logaddexp(total.lse_BHL, new.lse_BHL, out=total.lse_BHL)


def fits_one_pass(device_type: str, wide: torch.dtype, *parts: Part) -> bool:
    """Whether `fused_merge.merge` can merge such parts to a total in the dtype `wide`."""
    return (
        device_type == "cuda"
        and wide == torch.float32
        and all(
            part.out_BLHD.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and part.out_BLHD.stride(-1) == 1
            and part.lse_BHL.dtype == torch.float32
            for part in parts
        )
    )


class GradientPart(NamedTuple):
    """A gradient of some rows, or a part of it."""

    rows: Interval
    """Which rows of the whole; the tensor holds these alone."""
    grad_BLHD: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_BLHD.dtype

    def cut(self, rows: Interval) -> "GradientPart":
        if rows == self.rows:
            return self
        return GradientPart(rows, self.grad_BLHD[:, _slice(self.rows, rows)])

    def copy_(self, other: "GradientPart") -> None:
        self.grad_BLHD.copy_(other.grad_BLHD)

    def copied(self, dtype: torch.dtype) -> "GradientPart":
        return GradientPart(self.rows, _copied(self.grad_BLHD, dtype))


class RowSum(_RowTotals[GradientPart]):
    """Sums gradients of ranges of rows."""

    def add(self, rows: Interval, part_BLHD: Tensor) -> None:
        """Add a part that covers `rows`. It is kept, and may be written to."""
        self._add(GradientPart(rows, part_BLHD))

    @property
    def total(self) -> Tensor:
        """The sum as it stands: wide where some rows have several parts."""
        is_wide = any(part.dtype == self._wide for part in self._held)
        return self._whole(self._wide if is_wide else self.spec.dtype).grad_BLHD

    def result(self) -> Tensor:
        """The sum in the dtype of the tensor it is a gradient of."""
        return self._whole(self.spec.dtype).grad_BLHD

    def is_in(self, tensor: Tensor) -> bool:
        """Whether this tensor is the sum as it stands."""
        return len(self._held) == 1 and self._held[0].grad_BLHD is tensor

    def write_to(self, tensor: Tensor) -> None:
        """Put the sum into other memory, in its dtype."""
        self._write_to(GradientPart(self._all_rows, tensor))

    def _joined(self, old: GradientPart, new: GradientPart) -> GradientPart:
        total = old if old.dtype == self._wide else old.copied(self._wide)
        total.grad_BLHD.add_(new.grad_BLHD)
        return total

    def _empty(self, rows: Interval, dtype: torch.dtype) -> GradientPart:
        batch, _, heads, dim = self.spec.shape
        shape = (batch, rows.size, heads, dim)
        return GradientPart(rows, torch.empty(shape, dtype=dtype, device=self._device))

    def _clear(self, part: GradientPart) -> None:
        part.grad_BLHD.zero_()


def _copied(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)


def _slice(held: Interval, rows: Interval) -> slice:
    return slice(rows.start - held.start, rows.stop - held.start)
