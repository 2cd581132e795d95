"""The torch ops of flash-attn-3 (`hopper/flash_api.cpp`), in plain torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.kernels.fake_block import block, bounds, write_backward

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
        window=bounds(window_size_left, window_size_right),
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
        window=bounds(window_size_left, window_size_right),
        softcap=softcap,
        cumulative=(cu_seqlens_q, cu_seqlens_k),
        longest=(max_seqlen_q, max_seqlen_k),
    )
    return write_backward(given, (dq, dk, dv), dout, out, softmax_lse)
