"""Sums of partial results in float32 or wider: each contribution is rounded once at most."""

from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.machine import runs_triton
from longctx_patch.layout import Interval
from longctx_patch.transport import TensorSpec


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


class Part(NamedTuple):
    """Attention of some rows over some keys; lse is -inf for a row without any key."""

    rows: Interval
    """Which rows of the whole; out and lse hold these alone."""
    out_BLHD: Tensor
    lse_BHL: Tensor

    def cut(self, rows: Interval) -> "Part":
        """A view of some of its rows."""
        here = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return Part(rows, self.out_BLHD[:, here], self.lse_BHL[:, :, here])


class SoftmaxMerge:
    """Merges attention over several key blocks by their log-sum-exp (FlashAttention, section 3.1).

    The first part is adopted as it is, so a single block stays bitwise what the kernel returned.
    """

    def __init__(self, spec: TensorSpec, device: torch.device) -> None:
        self._spec = spec  # of out_BLHD
        self._wide = sum_dtype(spec.dtype)
        self._device = device
        self._held: Part | None = None

    def add(self, rows: Interval, out_BLHD: Tensor, lse_BHL: Tensor) -> None:
        """Merge a part that covers `rows`. It is kept, and may be written to."""
        new = Part(rows, out_BLHD, lse_BHL)
        self._held = new if self._held is None else self._merged(self._held, new)

    def _merged(self, old: Part, new: Part) -> Part:
        if not fits_one_pass(self._device.type, self._wide, old, new) or not runs_triton():
            total = self._spread(old, self._wide)
            merge_in_place(total.cut(new.rows), new)
            return total
        from longctx_patch.fused_merge import merge  # imports triton

        if old.rows == self._all_rows and old.out_BLHD.dtype == self._wide:
            merge(old.cut(new.rows), old, new)
            return old
        total = self._empty(self._wide)
        merge(total, old, new)
        return total

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BLHD in its dtype, lse_BHL); zeros and -inf for rows that saw no key."""
        dtype = self._spec.dtype
        whole = self._zeros(dtype) if self._held is None else self._spread(self._held, dtype)
        return whole.out_BLHD, whole.lse_BHL

    def _spread(self, part: Part, dtype: torch.dtype) -> Part:
        """The part over all rows: itself, as far as it has rows and dtype already."""
        if part.rows == self._all_rows:
            return part._replace(out_BLHD=part.out_BLHD.to(dtype))
        whole = self._zeros(dtype)
        place = whole.cut(part.rows)
        place.out_BLHD.copy_(part.out_BLHD)
        place.lse_BHL.copy_(part.lse_BHL)
        return whole

    def _zeros(self, dtype: torch.dtype) -> Part:
        """All rows, before they have seen a key."""
        whole = self._empty(dtype)
        whole.out_BLHD.zero_()
        whole.lse_BHL.fill_(-torch.inf)
        return whole

    def _empty(self, dtype: torch.dtype) -> Part:
        """Memory for all rows."""
        batch, rows, heads, _ = self._spec.shape
        out_BLHD = torch.empty(self._spec.shape, dtype=dtype, device=self._device)
        lse_BHL = torch.empty(batch, heads, rows, dtype=self._wide, device=self._device)
        return Part(self._all_rows, out_BLHD, lse_BHL)

    @property
    def _all_rows(self) -> Interval:
        return Interval(0, self._spec.shape[1])


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


class RowSum:
    """Sum of gradients over row ranges; a single part that covers all rows stays as it is."""

    def __init__(self, spec: TensorSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._total: Tensor | None = None

    def add(self, rows: Interval, part_BLHD: Tensor) -> None:
        if self._total is None and rows == Interval(0, self.spec.shape[1]):
            self._total = part_BLHD
            return
        wide = sum_dtype(self.spec.dtype)
        if self._total is None:
            self._total = torch.zeros(self.spec.shape, dtype=wide, device=self._device)
        self._total = self._total.to(wide)
        self._total[:, rows.start : rows.stop] += part_BLHD

    @property
    def total(self) -> Tensor:
        """The sum as it stands: a single part in its own dtype, or a wide sum."""
        if self._total is None:
            self._total = torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=self._device)
        return self._total

    def result(self) -> Tensor:
        """The sum in the dtype of the tensor it is a gradient of."""
        return self.total.to(self.spec.dtype)
