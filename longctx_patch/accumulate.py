"""Sums of partial results in float32 or wider: each contribution is rounded once at most."""

import torch
from torch import Tensor

from longctx_patch.layout import Interval
from longctx_patch.transport import TensorSpec


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


class SoftmaxMerge:
    """Merges attention over several key blocks by their log-sum-exp (FlashAttention, section 3.1).

    A row without any key has lse -inf; where both sides have, the difference is NaN and the weight
    0. A first part that covers all rows is adopted as it is, so a single block stays bitwise what
    the kernel returned.
    """

    def __init__(self, spec: TensorSpec, device: torch.device) -> None:
        self._spec = spec  # of out_BLHD
        self._device = device
        self._out_BLHD: Tensor | None = None
        self._lse_BHL: Tensor | None = None

    def add(self, rows: Interval, out_BLHD: Tensor, lse_BHL: Tensor) -> None:
        """Merge a part that covers `rows`."""
        if self._out_BLHD is None and rows == Interval(0, self._spec.shape[1]):
            self._out_BLHD, self._lse_BHL = out_BLHD, lse_BHL
            return
        total_out, total_lse = self._totals()
        old_out = total_out[:, rows.start : rows.stop]
        old_lse = total_lse[:, :, rows.start : rows.stop]
        # The difference of two lse is exact where it matters, so the weights add up to one however
        # large lse is; exp(lse - logaddexp) would carry the rounding of the sum into both.
        weight_BHL = torch.sigmoid(lse_BHL - old_lse).nan_to_num_(0.0)
        old_out.lerp_(out_BLHD.to(old_out.dtype), weight_BHL.transpose(1, 2)[..., None])
        torch.logaddexp(old_lse, lse_BHL, out=old_lse)

    def _totals(self) -> tuple[Tensor, Tensor]:
        """What is merged so far, in a dtype that partial results can be added in."""
        wide = sum_dtype(self._spec.dtype)
        if self._out_BLHD is None or self._lse_BHL is None:
            batch, rows, heads, _ = self._spec.shape
            self._out_BLHD = torch.zeros(self._spec.shape, dtype=wide, device=self._device)
            self._lse_BHL = self._out_BLHD.new_full((batch, heads, rows), -torch.inf)
        self._out_BLHD = self._out_BLHD.to(wide)
        return self._out_BLHD, self._lse_BHL

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BLHD in its dtype, lse_BHL); zeros and -inf for rows that saw no key."""
        out, lse = self._totals() if self._out_BLHD is None else (self._out_BLHD, self._lse_BHL)
        assert lse is not None
        return out.to(self._spec.dtype), lse


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
