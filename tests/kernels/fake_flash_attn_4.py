"""The functions of flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`), in plain torch."""

from torch import Tensor

from tests.kernels.fake_block import block, check_backward


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
