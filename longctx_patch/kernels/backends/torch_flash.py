"""torch's own flash attention on CUDA (FlashAttention-2, or 3 or 4 where torch is told so).

Its ops are wrapped in functions that are called like those of the packages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longctx_patch.kernels.backends.flash_attn import FlashAttnKernel, Functions, Signature
from longctx_patch.kernels.base import Domain, Traits

_aten = torch.ops.aten


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    **lengths: Any,
) -> tuple[Tensor, ...]:
    """(out, lse, ...); `lengths` are `cu_seqlens_q` and so on of packed rows, or none."""
    return _aten._flash_attention_forward(
        *(q, k, v, *_lengths(q, k, **lengths)),
        0.0,
        causal,
        False,
        scale=softmax_scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
    )


def flash_backward(
    *tensors: Tensor,
    causal: bool,
    softmax_scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    deterministic: bool = False,
    **lengths: Any,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv); `tensors` are dout, q, k, v, out and lse."""
    _, q, k, *_ = tensors
    # Without dropout the random state is not read, but the op wants tensors of this type.
    random_state = [torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, 0)]
    with _deterministic_algorithms(deterministic):
        return _aten._flash_attention_backward(
            *(*tensors, *_lengths(q, k, **lengths)),
            0.0,
            causal,
            *random_state,
            scale=softmax_scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
        )


def _lengths(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The lengths in the order of the op, which wants the size of a single segment too."""
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Set torch's switch for the whole process, which the op reads; warn-only counts as off."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


TORCH_FLASH = FlashAttnKernel(
    name="torch_flash",
    domain=Domain("cuda", (torch.bfloat16, torch.float16), max_head_dim=256, least_gpu=(8, 0)),
    signature=Signature(lambda _, packed: Functions(flash_forward, flash_backward), no_bound=None),
    package=None,
    traits=Traits(segments=True, windows=True, tiles=False, softcap=False),
)
