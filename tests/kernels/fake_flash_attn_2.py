"""The functions of flash-attn 2.8.3 (`flash_attn_interface.py`), in plain torch."""

from torch import Tensor

from tests.kernels.fake_block import block, bounds, write_backward


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
        window = bounds(window_size_left, window_size_right)
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
            window=bounds(window_size_left, window_size_right),
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
        window = bounds(window_size_left, window_size_right)
        given = block(
            *(q, k, v), scale=softmax_scale, causal=causal, window=window, softcap=softcap
        )
        self.deterministic.append(deterministic)
        return write_backward(given, (dq, dk, dv), dout, out, softmax_lse)

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
            window=bounds(window_size_left, window_size_right),
            softcap=softcap,
            cumulative=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        self.deterministic.append(deterministic)
        return write_backward(given, (dq, dk, dv), dout, out, softmax_lse)
