"""What the functions of the flash-attn packages have in common, in plain torch: their numbers and
their demands."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longctx_patch.kernels import Segments, Window
from tests.kernels.dense import table_of


@dataclass
class Block:
    """One call's queries and keys, as a whole table over all segments of a row."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    hidden_LM: Tensor
    packed: bool

    def scores(self) -> Tensor:
        q, k = (x.double() for x in (self.q, self.k))
        scores = torch.einsum("blhd,bmhd->bhlm", q, self._all_heads(k)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        return scores.masked_fill(self.hidden_LM, -torch.inf)

    def forward(self) -> tuple[Tensor, Tensor]:
        scores = self.scores()
        values = self._all_heads(self.v.double())
        out = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), values).to(self.q.dtype)
        lse = scores.logsumexp(-1).float()
        return (out[0], lse[0]) if self.packed else (out, lse)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """FlashAttention-2, algorithm 2, with whatever out and lse are given."""
        if self.packed:
            dout, out, lse = dout[None], out[None], lse[None]
        dout, out, q = dout.double(), out.double(), self.q.double()
        scores = self.scores()
        p = (scores - lse.double()[..., None]).exp()
        delta_BHL = (dout * out).sum(-1).transpose(1, 2)
        k, v = (self._all_heads(x.double()) for x in (self.k, self.v))
        ds = p * (torch.einsum("blhd,bmhd->bhlm", dout, v) - delta_BHL[..., None])
        if self.softcap is not None:
            ds = ds * (1 - (scores / self.softcap).square()).masked_fill(self.hidden_LM, 0)
        ds = ds * self.scale
        dq = torch.einsum("bhlm,bmhd->blhd", ds, k)
        dk, dv = (
            self._own_heads(torch.einsum("bhlm,blhd->bmhd", x, y)) for x, y in ((ds, q), (p, dout))
        )
        grads = tuple(x.to(self.q.dtype) for x in (dq, dk, dv))
        return tuple(x[0] for x in grads) if self.packed else grads

    def _all_heads(self, x_BMGD: Tensor) -> Tensor:
        return x_BMGD.repeat_interleave(self.q.shape[2] // x_BMGD.shape[2], 2)

    def _own_heads(self, x_BMHD: Tensor) -> Tensor:
        return x_BMHD.unflatten(2, (self.k.shape[2], -1)).sum(3)


def block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float | None,
    cumulative: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
) -> Block:
    """With all that the packages ask of their inputs."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert isinstance(scale, float)
    assert isinstance(causal, bool)
    if cumulative[0] is None or cumulative[1] is None:
        assert cumulative == (None, None)
        assert q.ndim == k.ndim == 4
        rows: tuple[int, ...]
        columns: tuple[int, ...]
        rows, columns = (q.shape[1],), (k.shape[1],)
    else:
        assert q.ndim == k.ndim == 3
        rows = _lengths(cumulative[0], longest[0], q)
        columns = _lengths(cumulative[1], longest[1], k)
        q, k, v = q[None], k[None], v[None]
    rule = Window(window[0], 0 if causal else window[1])
    if rule != (None, None):
        assert all(n <= m for n, m in zip(rows, columns, strict=True)), "fails with more rows"
    hidden = ~table_of(Segments(rows, columns, rule))
    packed = cumulative[0] is not None
    return Block(q, k, v, scale, softcap or None, hidden, packed)


def _lengths(cumulative: Tensor | None, longest: int | None, x_THD: Tensor) -> tuple[int, ...]:
    assert cumulative is not None
    assert cumulative.dtype == torch.int32
    assert cumulative.is_contiguous()
    assert cumulative[-1] == x_THD.shape[0]
    lengths = tuple(cumulative.diff().tolist())
    assert type(longest) is int
    assert longest == max(lengths)
    return lengths


def check_backward(block: Block, dout: Tensor, out: Tensor, lse: Tensor) -> None:
    assert dout.dtype == out.dtype == block.q.dtype
    assert dout.shape == out.shape == (block.q[0].shape if block.packed else block.q.shape)
    batch, rows, heads, _ = block.q.shape
    assert lse.shape == ((heads, rows) if block.packed else (batch, heads, rows))
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


def bounds(left: int, right: int) -> tuple[int | None, int | None]:
    assert type(left) is type(right) is int
    return None if left < 0 else left, None if right < 0 else right


def write_backward(
    given: Block, grads: tuple[Tensor, ...], dout: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    check_backward(given, dout, out, lse)
    for buffer, right in zip(grads, given.backward(dout, out, lse), strict=True):
        assert buffer.shape == right.shape
        assert buffer.is_contiguous()
        buffer.copy_(right)
    return lse.clone()
