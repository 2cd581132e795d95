"""Attention in plain torch: all rules, any device. `reference` in float64, `torch_eager` faster.

Scores are computed for a chunk of rows at a time, over the columns that the chunk can see, so
memory stays bounded at any length. Heads that share keys are rows of one matrix product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from longctx_patch.kernels.base import (
    EVERYTHING,
    BackwardInputs,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    Window,
    dtype_name,
)
from longctx_patch.sequence.regions import Tile

_CHUNK_BYTES = 64 * 2**20  # of scores; a few tensors of this size live at once


@dataclass(frozen=True)
class DenseKernel:
    """One algorithm in two precisions."""

    name: str
    compute_dtype: torch.dtype | None
    """The dtype that it computes in; None: that of the inputs, float32 at least."""
    traits: Traits = EVERYTHING
    domain = Domain(None, (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    chunk_bytes: int = _CHUNK_BYTES

    def refuses(self, request: KernelRequest) -> str | None:
        if request.dtype.is_floating_point:
            return None
        return f"takes floats, tensors are {dtype_name(request.dtype)}"

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        k, v = self._by_head(k_BMGD), self._by_head(v_BMGD)
        out_BLHD = torch.empty_like(q_BLHD)
        lse_BHL = self._empty_lse(q_BLHD)
        for rows, columns, hidden_LM in self._chunks(q_BLHD, segments):
            q_BGRLD = self._grouped(q_BLHD[:, rows], k.shape[1])
            scores = _scores(q_BGRLD, k[:, :, columns], score, hidden_LM)
            lse_BGRL = torch.logsumexp(scores, -1)
            p_BGRLM = scores.sub_(lse_BGRL[..., None]).exp_()
            out_BLHD[:, rows] = _ungrouped(_times(p_BGRLM, v[:, :, columns])).to(out_BLHD.dtype)
            lse_BHL[:, :, rows] = lse_BGRL.flatten(1, 2).to(lse_BHL.dtype)
        return out_BLHD, lse_BHL

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD, lse_BHL = given
        k, v = self._by_head(k_BMGD), self._by_head(v_BMGD)
        dq_BLHD, dk, dv = torch.empty_like(q_BLHD), torch.zeros_like(k), torch.zeros_like(v)
        for rows, columns, hidden_LM in self._chunks(q_BLHD, segments):
            q, dout, out = (
                self._grouped(x[:, rows], k.shape[1]) for x in (q_BLHD, dout_BLHD, out_BLHD)
            )
            lse_BGRL1 = lse_BHL[:, :, rows].to(k.dtype).unflatten(1, (k.shape[1], -1))[..., None]
            scores = _scores(q, k[:, :, columns], score, hidden_LM)
            p = torch.exp(scores - lse_BGRL1)
            dv[:, :, columns] += _over_rows(p, dout)
            delta_BGRL1 = (dout * out).sum(-1, keepdim=True)
            dscores = _times(dout, v[:, :, columns].mT).sub_(delta_BGRL1).mul_(p)
            ds = _through_cap(dscores, scores, score)
            dq_BLHD[:, rows] = _ungrouped(_times(ds, k[:, :, columns])).to(dq_BLHD.dtype)
            dk[:, :, columns] += _over_rows(ds, q)
        dk_BMGD, dv_BMGD = (x.transpose(1, 2) for x in (dk, dv))
        return dq_BLHD, dk_BMGD.to(k_BMGD.dtype), dv_BMGD.to(v_BMGD.dtype)

    def _by_head(self, x_BMGD: Tensor) -> Tensor:
        """`[B, G, M, D]` in the dtype of the computation."""
        return x_BMGD.transpose(1, 2).to(self._dtype(x_BMGD.dtype))

    def _grouped(self, x_BLHD: Tensor, num_kv_heads: int) -> Tensor:
        """`[B, G, H / G, L, D]` in the dtype of the computation."""
        wide = x_BLHD.to(self._dtype(x_BLHD.dtype))
        return wide.transpose(1, 2).unflatten(1, (num_kv_heads, -1))

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute_dtype or torch.promote_types(dtype, torch.float32)

    def _empty_lse(self, q_BLHD: Tensor) -> Tensor:
        dtype = torch.promote_types(q_BLHD.dtype, torch.float32)
        batch, rows, heads, _ = q_BLHD.shape
        return torch.empty(batch, heads, rows, dtype=dtype, device=q_BLHD.device)

    def _chunks(
        self, q_BLHD: Tensor, segments: Segments
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Each chunk of the packed tensors: rows, columns, and which pairs are hidden, if any."""
        batch, _, heads, _ = q_BLHD.shape
        row_of_one = batch * heads * self._dtype(q_BLHD.dtype).itemsize
        first_row = first_column = 0
        for n, m in zip(segments.q, segments.kv, strict=True):
            step = _rows_of(self.chunk_bytes // row_of_one, m, segments.rule)
            for start in range(0, n, step):
                rows = slice(start, min(start + step, n))
                columns, hidden_LM = _seen(segments.rule, rows, n, m, q_BLHD.device)
                yield _moved(rows, first_row), _moved(columns, first_column), hidden_LM
            first_row, first_column = first_row + n, first_column + m


def _rows_of(num_scores: int, m: int, rule: Window | Tile) -> int:
    """About how many rows see `num_scores` columns in all; one at least."""
    rows = max(1, num_scores // m)
    if isinstance(rule, Tile) or rule.left is None or rule.right is None:
        return rows
    # s rows of a window of w columns see w + s columns or fewer.
    width = rule.left + rule.right + 1
    return max(rows, min(num_scores // (2 * width), isqrt(num_scores // 2)))


def _moved(rows: slice, offset: int) -> slice:
    return slice(rows.start + offset, rows.stop + offset)


def _seen(
    rule: Window | Tile, rows: slice, n: int, m: int, device: torch.device
) -> tuple[slice, Tensor | None]:
    """The columns that any of these rows sees, and which of those pairs are hidden, if any."""
    if isinstance(rule, Tile):
        return slice(0, m), torch.from_numpy(~rule.bits[rows]).to(device)
    left, right = rule
    first = 0 if left is None else max(0, rows.start + m - n - left)
    last = m if right is None else min(m, rows.stop + m - n + right)
    ahead = torch.arange(first, last, device=device) - (m - n)
    ahead_LM = ahead - torch.arange(rows.start, rows.stop, device=device)[:, None]
    hidden_LM = None if left is None else ahead_LM < -left
    if right is not None:
        hidden_LM = ahead_LM > right if hidden_LM is None else hidden_LM | (ahead_LM > right)
    return slice(first, last), hidden_LM


def _scores(q_BGRLD: Tensor, k_BGMD: Tensor, score: Score, hidden_LM: Tensor | None) -> Tensor:
    """The scores that the softmax sees: minus infinity where a pair is hidden."""
    scores_BGRLM = _times(q_BGRLD, k_BGMD.mT).mul_(score.scale)
    if score.softcap is not None:
        scores_BGRLM.div_(score.softcap).tanh_().mul_(score.softcap)
    if hidden_LM is not None:
        scores_BGRLM.masked_fill_(hidden_LM, -torch.inf)
    return scores_BGRLM


def _through_cap(dscores: Tensor, scores: Tensor, score: Score) -> Tensor:
    """The gradient of the dot products; hidden pairs have none, whatever their score."""
    if score.softcap is not None:
        slope = 1 - (scores / score.softcap).square_()
        dscores = dscores * slope.masked_fill_(scores == -torch.inf, 0)
    return dscores * score.scale


def _times(x_BGRLM: Tensor, y_BGMN: Tensor) -> Tensor:
    """A matrix product whose heads of one group share the right side."""
    group = x_BGRLM.shape[2]
    return (x_BGRLM.flatten(2, 3) @ y_BGMN).unflatten(2, (group, -1))


def _over_rows(x_BGRLM: Tensor, y_BGRLD: Tensor) -> Tensor:
    """`[B, G, M, D]`: summed over the rows and the heads of a group."""
    return x_BGRLM.flatten(2, 3).mT @ y_BGRLD.flatten(2, 3)


def _ungrouped(x_BGRLD: Tensor) -> Tensor:
    """`[B, L, H, D]`."""
    return x_BGRLD.flatten(1, 2).transpose(1, 2)
