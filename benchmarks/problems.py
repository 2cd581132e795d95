"""The attention problems that operators are measured on, and their right results.

Legend: B batch (1), L tokens of one rank, N all tokens, H query heads, G key-value heads, D head
dim.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from measure import dtype_on
from torch import Tensor

MaskName = Literal["causal", "packed", "window"]
RESULTS = ("out", "dq", "dk", "dv")
SHARPNESS = 3.0  # standard deviation of the logits
SPREAD = 1.0  # standard deviation of the logarithm of document lengths
AREA_ROW_MULTIPLE = 256
CHECK_DOCUMENTS = 7


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Causal attention over one sequence, of one or several documents, perhaps with a window."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Each token sees the last `window` keys, itself included; None: all before it."""
    lengths: tuple[int, ...] | None = None
    """The lengths of documents that don't see each other; None: one document."""

    @property
    def mask(self) -> MaskName:
        if self.lengths is not None:
            return "packed"
        return "causal" if self.window is None else "window"

    @property
    def area(self) -> int:
        """Allowed pairs of query and key."""
        return sum(_area(length, self.window) for length in self.lengths or (self.num_tokens,))

    @property
    def flops(self) -> int:
        """Forward and backward: two and five matrix products per pair (FlashAttention-2)."""
        return 2 * 7 * self.area * self.num_heads * self.head_dim

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        mask = {
            "causal": "causal",
            "packed": f"{len(self.lengths or ())} documents",
            "window": f"window {self.window}",
        }
        return f"{self.num_tokens:,} tokens, {heads}, {mask[self.mask]}"


def _area(length: int, window: int | None) -> int:
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def lognormal_lengths(num_tokens: int, num_documents: int) -> tuple[int, ...]:
    """Lengths of documents that fill a row; the same for the same arguments."""
    weights = np.random.default_rng(0).lognormal(0.0, SPREAD, num_documents)
    edges = np.rint(np.cumsum(weights) / weights.sum() * num_tokens).astype(int)
    lengths = np.diff(edges, prepend=0)
    return tuple(int(length) for length in lengths if length > 0)


def small(problem: Problem, num_tokens: int) -> Problem:
    """The same kind of problem, of a size at which a dense result can be had."""
    if num_tokens >= problem.num_tokens:
        return problem
    window, lengths = problem.window, problem.lengths
    if window is not None:
        window = max(2, window * num_tokens // problem.num_tokens)
    if lengths is not None:
        lengths = lognormal_lengths(num_tokens, min(len(lengths), CHECK_DOCUMENTS))
    return replace(problem, num_tokens=num_tokens, window=window, lengths=lengths)


def ideal_row(problem: Problem, num_ranks: int) -> Problem:
    """What one rank would compute if all shared the work evenly and nothing had to be sent.

    That is a part of the heads over all tokens, as one causal row. For documents or a window it is
    a causal row of nearly the same area, on which kernels are fastest; `share_of` has the ratio.
    """
    heads, kv_heads = problem.num_heads // num_ranks, max(1, problem.num_kv_heads // num_ranks)
    if heads * num_ranks != problem.num_heads or heads % kv_heads:
        raise ValueError(
            f"{problem.num_heads} query heads on {num_ranks} ranks: the ideal gives each as many. "
            "Take a number of heads that the ranks divide."
        )
    num_tokens = problem.num_tokens
    if problem.mask != "causal":
        side = (2 * problem.area) ** 0.5
        num_tokens = max(1, round(side / AREA_ROW_MULTIPLE)) * AREA_ROW_MULTIPLE
    return Problem(
        num_tokens=num_tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=problem.head_dim,
    )


def share_of(problem: Problem, num_ranks: int) -> float:
    """A rank's work in `problem`, as a multiple of that in `ideal_row(problem, num_ranks)`."""
    return problem.flops / num_ranks / ideal_row(problem, num_ranks).flops


class Shards(NamedTuple):
    """The tokens of one rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def random_shards(problem: Problem, num_tokens: int, device: torch.device, seed: int) -> Shards:
    """Random queries, keys, values and gradients of `num_tokens` tokens for a problem's heads.

    Queries are scaled so that a few keys dominate each row. Otherwise the outputs of late tokens
    would be means of thousands of values, near zero even if computed wrongly.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def tokens(heads: int, scale: float = 1.0) -> Tensor:
        shape = (1, num_tokens, heads, problem.head_dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return (x * scale).to(dtype_on(device))

    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    return Shards(tokens(heads, SHARPNESS), tokens(kv_heads), tokens(kv_heads), tokens(heads))


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@lru_cache(maxsize=8)
def dense_results(problem: Problem, device: torch.device) -> tuple[Shards, Results]:
    """Whole tensors, the same on every rank, and the results of attention on them in float64."""
    whole = random_shards(problem, problem.num_tokens, device, seed=0)
    q, k, v, dout = (x[0].transpose(0, 1).double() for x in whole)  # [heads, N, D]
    scale, group = problem.head_dim**-0.5, problem.num_heads // problem.num_kv_heads
    allowed_NN = _allowed(problem, device)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for head in range(problem.num_heads):  # one at a time, since a head's scores are [N, N]
        kv = head // group
        scores_NN = (q[head] @ k[kv].T * scale).masked_fill_(~allowed_NN, -torch.inf)
        p_NN = scores_NN.softmax(-1)
        out[head] = p_NN @ v[kv]
        dv[kv] += p_NN.T @ dout[head]
        dp_NN = dout[head] @ v[kv].T
        ds_NN = p_NN * (dp_NN - (dout[head] * out[head]).sum(-1, keepdim=True))
        dq[head] = ds_NN @ k[kv] * scale
        dk[kv] += ds_NN.T @ q[head] * scale
    return whole, Results(*(x.transpose(0, 1)[None] for x in (out, dq, dk, dv)))


def _allowed(problem: Problem, device: torch.device) -> Tensor:
    """Boolean `[N, N]`: which key each query sees."""
    tokens = torch.arange(problem.num_tokens, device=device)
    back = tokens[:, None] - tokens
    allowed = back >= 0
    if problem.window is not None:
        allowed &= back < problem.window
    if problem.lengths is not None:
        counts = torch.tensor(problem.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        allowed &= document[:, None] == document
    return allowed


class Difference(NamedTuple):
    """How far a result is from what it should be."""

    whole: float
    """Norm of the difference over the norm of the result."""
    worst_token: float
    """The largest, over tokens, of the norm of the difference over the sum of that token's norm and
    the root mean square of all tokens' norms."""


def difference(mine_BLHD: Tensor, right_BLHD: Tensor) -> Difference:
    """Compare a result with the right one; a NaN in it makes both numbers NaN."""
    right = right_BLHD.double()
    apart_L = torch.linalg.vector_norm(mine_BLHD.double() - right, dim=(0, 2, 3))
    norm_L = torch.linalg.vector_norm(right, dim=(0, 2, 3))
    mean = norm_L.square().mean().sqrt()
    whole = apart_L.norm() / norm_L.norm()
    return Difference(float(whole), float((apart_L / (norm_L + mean)).max()))


TOLERANCES = {
    torch.bfloat16: Difference(2e-2, 5e-2),  # a few times the error of rounding
    torch.float32: Difference(1e-5, 1e-4),
}
