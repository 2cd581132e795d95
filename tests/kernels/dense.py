"""Attention over a whole table of pairs, through autograd in float64; independent of the package.

A problem has keys that a kernel call gets, and others (of other ranks) that only count in the
global out and lse, like the sink.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx_patch.kernels import Score, Segments
from longctx_patch.sequence.regions import Tile


class Problem(NamedTuple):
    """The inputs, `[2, tokens, heads, dim]`, and a sink for each head."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    other_k: Tensor
    other_v: Tensor
    sink_H: Tensor


class Answer(NamedTuple):
    """Results over the given keys alone (`own_`) and over all; gradients through the given keys."""

    own_out: Tensor
    own_lse: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def problem(
    rows: int,
    columns: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    *,
    dim: int = 8,
    device: str = "cpu",
) -> Problem:
    generator = torch.Generator(device).manual_seed(rows * 1000 + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    queries, keys, others = (2, rows, heads[0], dim), (2, columns, heads[1], dim), (2, 5, heads[1])
    return Problem(
        normal(*queries),
        normal(*keys),
        normal(*keys),
        normal(*queries),
        normal(*others, dim),
        normal(*others, dim),
        normal(heads[0]),
    )


@lru_cache
def table_of(segments: Segments) -> Tensor:
    """The table of packed rows and columns, filled pair by pair from the definitions."""
    table = np.zeros((sum(segments.q), sum(segments.kv)), dtype=np.bool_)
    row = column = 0
    for n, m in zip(segments.q, segments.kv, strict=True):
        for i in range(n):
            for j in range(m):
                table[row + i, column + j] = _allows(segments, i, j, n, m)
        row, column = row + n, column + m
    return torch.from_numpy(table)


def _allows(segments: Segments, i: int, j: int, n: int, m: int) -> bool:
    if isinstance(segments.rule, Tile):
        return bool(segments.rule.bits[i, j])
    left, right = segments.rule
    ahead = j - (i + m - n)
    return (left is None or ahead >= -left) and (right is None or ahead <= right)


def answer(problem: Problem, table_LM: Tensor, score: Score) -> Answer:
    """The exact results. dq comes from the given keys only: others are scored by a copy of q."""
    q, k, v, other_q, other_k, other_v, sink_H = (
        x.detach().double()
        for x in (*problem[:3], problem.q, problem.other_k, problem.other_v, problem.sink_H)
    )
    for leaf in (q, k, v):
        leaf.requires_grad_()
    groups = q.shape[2] // k.shape[2]
    hidden_LM = ~table_LM.to(q.device)
    own = _scores(q, k, score, groups).masked_fill(hidden_LM, -torch.inf)
    values = v.repeat_interleave(groups, 2)
    others = _scores(other_q, other_k, score, groups)
    sink = sink_H[None, :, None, None].expand(*own.shape[:3], 1)
    everything = torch.cat([own, others, sink], -1)
    p = everything.softmax(-1)
    all_values = torch.cat([values, other_v.repeat_interleave(groups, 2)], 1)
    out = torch.einsum("bhlm,bmhd->blhd", p[..., :-1], all_values)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), problem.dout.double())
    own_out = torch.einsum("bhlm,bmhd->blhd", own.softmax(-1), values)
    lses = own.logsumexp(-1), everything.logsumexp(-1)
    return Answer(own_out.detach(), lses[0].detach(), out.detach(), lses[1].detach(), dq, dk, dv)


def _scores(q: Tensor, k: Tensor, score: Score, groups: int) -> Tensor:
    scores = torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(groups, 2)) * score.scale
    return scores if score.softcap is None else score.softcap * (scores / score.softcap).tanh()
