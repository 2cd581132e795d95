"""The functions of the flash-attn packages, in plain torch, with their names and their demands.

Parameters are those of flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`), of the torch ops of
flash-attn-3 (`hopper/flash_api.cpp`) and of flash-attn 2.8.3 (`flash_attn_interface.py`), without
those that training has no use for: an argument under a wrong name is a TypeError here as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longctx_patch.kernels import Kernel, Segments, Window
from longctx_patch.kernels.flash_attn_2 import FlashAttn2Kernel
from longctx_patch.kernels.flash_attn_3 import FlashAttn3Kernel
from longctx_patch.kernels.flash_attn_4 import FlashAttn4Kernel
from longctx_patch.kernels.machine import Package
from tests.kernels.dense import table_of


@dataclass(frozen=True)
class LoadedPackage(Package):
    """A package that is always there."""

    content: Any = field(default=None, compare=False)

    def problem(self) -> str | None:
        return None

    def load(self) -> Any:
        return self.content


def loaded(content: Any) -> LoadedPackage:
    return LoadedPackage("fake", "fake", "0", "nothing", content)


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


class FlashAttn4:
    """Module `flash_attn.cute.interface`. Absent bounds are None."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: None = None,
        seqused_k: None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: None = None,
        page_table: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        learnable_sink: None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor | None, ...]:
        given = block(
            *(q, k, v),
            scale=softmax_scale,
            causal=causal,
            window=(window_size_left, window_size_right),
            softcap=softcap,
            cumulative=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        out, lse = given.forward()
        return out, lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        m_block_size: int = 64,
        n_block_size: int = 128,
        num_threads: int = 256,
        pack_gqa: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, ...]:
        assert isinstance(softcap, float)
        given = block(
            *(q, k, v),
            scale=softmax_scale,
            causal=causal,
            window=(window_size_left, window_size_right),
            softcap=softcap,
            cumulative=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        check_backward(given, dout, out, lse)
        self.deterministic.append(deterministic)
        return given.backward(dout, out, lse)


class FlashAttn2:
    """Module `flash_attn.flash_attn_interface`. Absent bounds are -1; gradients are written."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _flash_attn_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: None,
        return_softmax: bool,
    ) -> tuple[Tensor | None, ...]:
        assert (dropout_p, return_softmax) == (0.0, False)
        window = _bounds(window_size_left, window_size_right)
        given = block(
            *(q, k, v), scale=softmax_scale, causal=causal, window=window, softcap=softcap
        )
        return (*given.forward(), None, None)

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor | None, ...]:
        assert (dropout_p, return_softmax) == (0.0, False)
        given = block(
            *(q, k, v),
            scale=softmax_scale,
            causal=causal,
            window=_bounds(window_size_left, window_size_right),
            softcap=softcap,
            cumulative=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        return (*given.forward(), None, None)

    def _flash_attn_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: None,
        deterministic: bool,
        rng_state: None = None,
    ) -> Tensor:
        window = _bounds(window_size_left, window_size_right)
        given = block(
            *(q, k, v), scale=softmax_scale, causal=causal, window=window, softcap=softcap
        )
        self.deterministic.append(deterministic)
        return _write_backward(given, (dq, dk, dv), dout, out, softmax_lse)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: None,
        deterministic: bool,
        rng_state: None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        given = block(
            *(q, k, v),
            scale=softmax_scale,
            causal=causal,
            window=_bounds(window_size_left, window_size_right),
            softcap=softcap,
            cumulative=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        self.deterministic.append(deterministic)
        return _write_backward(given, (dq, dk, dv), dout, out, softmax_lse)


FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
    "Tensor(a!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, int num_splits=0, int sm_margin=0) "
    "-> (Tensor, Tensor, Tensor?, Tensor?)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> Tensor"
)


@contextmanager
def flash_attn_3_ops() -> Iterator[None]:
    """The ops `torch.ops.flash_attn_3`, on CPU. Absent bounds are -1; gradients are written."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FA3_FORWARD)
    library.define(FA3_BACKWARD)
    library.impl("fwd", _fa3_forward, "CPU")
    library.impl("bwd", _fa3_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: None = None,
    v_new: None = None,
    q_v: None = None,
    out: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    seqused_q: None = None,
    seqused_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> tuple[Tensor | None, ...]:
    assert num_splits == 1
    given = block(
        *(q, k, v),
        scale=softmax_scale,
        causal=is_causal,
        window=_bounds(window_size_left, window_size_right),
        softcap=softcap,
        cumulative=(cu_seqlens_q, cu_seqlens_k),
        longest=(max_seqlen_q, max_seqlen_k),
    )
    return (*given.forward(), None, None)


def _fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: None = None,
    seqused_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    assert dout.stride(-1) == 1
    assert out.stride(-1) == 1
    given = block(
        *(q, k, v),
        scale=softmax_scale,
        causal=is_causal,
        window=_bounds(window_size_left, window_size_right),
        softcap=softcap,
        cumulative=(cu_seqlens_q, cu_seqlens_k),
        longest=(max_seqlen_q, max_seqlen_k),
    )
    return _write_backward(given, (dq, dk, dv), dout, out, softmax_lse)


def _bounds(left: int, right: int) -> tuple[int | None, int | None]:
    assert type(left) is type(right) is int
    return None if left < 0 else left, None if right < 0 else right


def _write_backward(
    given: Block, grads: tuple[Tensor, ...], dout: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    check_backward(given, dout, out, lse)
    for buffer, right in zip(grads, given.backward(dout, out, lse), strict=True):
        assert buffer.shape == right.shape
        assert buffer.is_contiguous()
        buffer.copy_(right)
    return lse.clone()


def fake_kernels() -> dict[str, Kernel]:
    """The adapters over these functions. For flash_attn_3, within `flash_attn_3_ops`."""
    return {
        "flash_attn_4": FlashAttn4Kernel(package=loaded(FlashAttn4())),
        "flash_attn_3": FlashAttn3Kernel(package=loaded(None)),
        "flash_attn_2": FlashAttn2Kernel(package=loaded(FlashAttn2())),
    }
