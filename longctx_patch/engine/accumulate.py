"""Totals of partial results, in float32 or wider: each contribution is rounded once at most.

Rows with a single part keep it as it came, bit for bit. In a packed row most rows have one part,
and summing all rows would cost more than the exchange of the few keys that travel.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.installed import runs_triton
from longctx_patch.sequence.layout import Interval
from longctx_patch.transport import TensorSpec


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


class Part(NamedTuple):
    """A result that is held for some rows: gradients, or an attention output with its lse.

    An output is (lse_BLH, out_BLHD), of some rows over some keys; lse is -inf for a row without
    any key.
    """

    rows: Interval
    """Its rows of the whole; the tensors hold these alone, along dim 1."""
    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output or of the gradients."""
        return self.tensors[-1].dtype

    def cut(self, rows: Interval) -> "Part":
        """A view of some of this part's rows."""
        if rows == self.rows:
            return self
        here = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return Part(rows, tuple(tensor[:, here] for tensor in self.tensors))

    def copy_(self, other: "Part") -> None:
        """Copy the numbers of another part of the same rows."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


MOST_AT_ONCE = 16
"""The most held parts that a new one may overlap before all rows become one total."""


class RowTotals(ABC):
    """Totals of parts that cover ranges of rows. Added tensors are kept and may be written to."""

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        """`specs`: those of the total's tensors, rows along dim 1."""
        self.specs = specs
        self.device = device
        self._dtype = specs[-1].dtype
        self._wide = sum_dtype(self._dtype)
        self._all_rows = Interval(0, specs[-1].shape[1])
        self._held: list[Part] = []
        """Parts of disjoint rows, in row order: each as it came, or the wide total of several."""
        self._home: Part | None = None
        """The first part, if it had all rows and still holds most of them. In the end the totals of
        the other rows are written into its memory too."""
        self._at_home = 0
        """The rows that `_home` still holds."""

    @abstractmethod
    def _joined(self, old: Part, new: Part) -> Part:
        """The wide total of two parts of the same rows: in the memory of `old` if that is wide."""

    def result(self) -> tuple[Tensor, ...]:
        """The total in the dtype of the model; rows without any part are cleared."""
        return self._whole(self._dtype).tensors

    def total(self) -> tuple[Tensor, ...]:
        """The total as it stands, for other totals to add."""
        return self.result()

    def is_in(self, tensors: Sequence[Tensor]) -> bool:
        """Says whether these tensors are the total as it stands."""
        return len(self._held) == 1 and all(map(is_, self._held[0].tensors, tensors))

    def write_to(self, tensors: tuple[Tensor, ...]) -> None:
        """Write the total to `tensors`, in their dtype."""
        whole = Part(self._all_rows, tensors)
        if sum(part.rows.size for part in self._held) < self._all_rows.size:
            self._clear(whole)
        for part in self._held:
            whole.cut(part.rows).copy_(part)

    def add(self, rows: Interval, tensors: tuple[Tensor, ...]) -> None:
        """Add a part that covers `rows`."""
        if not rows.size:
            return
        new = Part(rows, tensors)
        if not self._held and rows == self._all_rows and new.dtype != self._wide:
            self._home, self._at_home = new, rows.size
        first, last = self._overlapping(rows)
        if last - first > MOST_AT_ONCE:
            self._held, self._home = [self._whole(self._wide)], None
            first, last = 0, 1
        self._held[first:last] = list(self._replacements(self._held[first:last], new))
        if self._home is not None and 2 * self._at_home < self._all_rows.size:
            self._free_home()

    def _replacements(self, held: list[Part], new: Part) -> Iterator[Part]:
        """The parts that replace the `held` ones, all of which share rows with `new`."""
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

    def _overlapping(self, rows: Interval) -> tuple[int, int]:
        """The index range of the held parts that share rows with `rows`."""
        first = bisect_right(self._held, rows.start, key=lambda part: part.rows.stop)
        return first, bisect_left(self._held, rows.stop, first, key=lambda part: part.rows.start)

    def _free_home(self) -> None:
        """Copy what is held in the first part's memory, so that the memory can be freed."""
        self._home = None
        self._held = [
            part if part.dtype == self._wide else self._copied(part, part.dtype)
            for part in self._held
        ]

    def _whole(self, dtype: torch.dtype) -> Part:
        """All rows in one dtype."""
        if len(self._held) == 1 and (only := self._held[0]).rows == self._all_rows:
            return only if only.dtype == dtype else self._copied(only, dtype)
        if self._home is not None and self._home.dtype == dtype:
            for part in self._held:
                if part.dtype != dtype:
                    self._home.cut(part.rows).copy_(part)
            return self._home
        whole = self._empty(self._all_rows, dtype)
        self.write_to(whole.tensors)
        return whole

    def _copied(self, part: Part, dtype: torch.dtype) -> Part:
        """A copy of a part, in memory of its own."""
        copy = self._empty(part.rows, dtype)
        copy.copy_(part)
        return copy

    def _empty(self, rows: Interval, dtype: torch.dtype) -> Part:
        """Uninitialised memory for some rows; the lse is wide whatever `dtype` is."""
        tensors = []
        for spec in self.specs:
            batch, _, heads, *dim = spec.shape
            shape = (batch, rows.size, heads, *dim) if dim else (batch, heads, rows.size)
            found = torch.promote_types(spec.dtype, dtype)
            memory = torch.empty(shape, dtype=found, device=self.device)
            tensors.append(memory if dim else memory.transpose(1, 2))  # kernels have lse_BHL
        return Part(rows, tuple(tensors))

    def _clear(self, part: Part) -> None:
        """Fill a part with the values of rows that nothing was added to."""
        for tensor in part.tensors:
            tensor.zero_()


def out_specs(out: TensorSpec) -> list[TensorSpec]:
    """The specs of lse_BLH and out_BLHD, as they are merged and travel together."""
    return [TensorSpec(out.shape[:3], sum_dtype(out.dtype)), out]


class SoftmaxMerge(RowTotals):
    """Merges attention over key blocks by their log-sum-exp (FlashAttention, section 3.1)."""

    def _joined(self, old: Part, new: Part) -> Part:
        total = old if old.dtype == self._wide else self._empty(old.rows, self._wide)
        if fits_one_pass(self.device.type, self._wide, old, new) and runs_triton():
            from longctx_patch.engine.fused_merge import merge  # imports triton

            merge(total, old, new)
            return total
        if total is not old:
            total.copy_(old)
        merge_in_place(total, new)
        return total

    def _clear(self, part: Part) -> None:
        lse_BLH, out_BLHD = part.tensors
        lse_BLH.fill_(-torch.inf)
        out_BLHD.zero_()


def merge_in_place(total: Part, new: Part) -> None:
    """Merge a part into the same rows of a total, by torch's own operators.

    A new row without any key has lse -inf and weighs 0, even if the total's row has no key either
    and the difference is NaN. NaN from the inputs stays.
    """
    # The difference of two lse is exact where it matters, so the weights add up to one however
    # large lse is; exp(lse - logaddexp) would carry the rounding of the sum into both.
    (total_lse, total_out), (new_lse, new_out) = total.tensors, new.tensors
    weight_BLH = torch.sigmoid(new_lse - total_lse)
    weight_BLH.masked_fill_(new_lse == -torch.inf, 0.0)
    total_out.lerp_(new_out.to(total_out.dtype), weight_BLH[..., None])
    torch.logaddexp(total_lse, new_lse, out=total_lse)


def fits_one_pass(device_type: str, wide: torch.dtype, *parts: Part) -> bool:
    """Says whether `fused_merge.merge` can merge such parts to a total in the dtype `wide`."""
    return (
        device_type == "cuda"
        and wide == torch.float32
        and all(
            out_BLHD.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and out_BLHD.stride(-1) == 1
            and lse_BLH.dtype == torch.float32
            for _, (lse_BLH, out_BLHD) in parts
        )
    )


class RowSum(RowTotals):
    """Sums gradients of ranges of rows."""

    def total(self) -> tuple[Tensor, ...]:
        """The sums as they stand: wide where some rows have several parts."""
        is_wide = any(part.dtype == self._wide for part in self._held)
        return self._whole(self._wide if is_wide else self._dtype).tensors

    def _joined(self, old: Part, new: Part) -> Part:
        total = old if old.dtype == self._wide else self._copied(old, self._wide)
        for mine, theirs in zip(total.tensors, new.tensors, strict=True):
            mine.add_(theirs)
        return total
