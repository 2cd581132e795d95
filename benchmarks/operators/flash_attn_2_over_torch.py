"""Stands in for the package flash-attn 2 where it isn't installed, for the peers that import it.

torch ships the same FlashAttention-2 kernels as ops (`aten::_flash_attention_forward`), so peers
run without building the package. What differs: the package writes gradients into given tensors, the
ops return new ones, so each backward costs a copy of dq, dk and dv more (1 to 2 % of a block of
16,384 tokens on an H200). On CPU, for trying the scripts, plain torch computes the same.

Only what ring-flash-attn 0.1.8, yunchang 0.6.4 and `operators/alst.py` use is here.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"  # whose signatures these are
_aten = torch.ops.aten


def install() -> str:
    """Make `import flash_attn` work; returns which one it is.

    The package itself is taken where it is installed. flash-attn 4 has the same top-level name and
    none of these functions: it is hidden from this process then.
    """
    if "flash_attn" not in sys.modules and _package_is_there():
        import flash_attn

        return f"flash-attn {flash_attn.__version__}"
    if getattr(sys.modules.get("flash_attn"), "is_over_torch", None) is None:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        for module in (package, interface):
            module.__spec__ = ModuleSpec(module.__name__, None)
            module.__dict__.update(_FUNCTIONS)
        package.__dict__.update(
            __version__=VERSION, __path__=[], is_over_torch=True, flash_attn_interface=interface
        )
        sys.modules |= {module.__name__: module for module in (package, interface)}
    return "torch's FlashAttention-2 ops"


def _package_is_there() -> bool:
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """(out_BLHD, lse_BHL, nothing, nothing)."""
    _require_plain(dropout_p, softcap, alibi_slopes)
    rule = _Rule(softmax_scale, causal, window_size_left, window_size_right)
    out, lse = rule.forward(q, k, v, None, None, q.shape[1], k.shape[1])
    return out, lse, None, None


def _flash_attn_varlen_forward(
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
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """(out `[tokens, H, D]`, lse `[H, tokens]`, nothing, nothing)."""
    _require_plain(dropout_p, softcap, alibi_slopes)
    rule = _Rule(softmax_scale, causal, window_size_left, window_size_right)
    out, lse = rule.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return out, lse, None, None


def _flash_attn_backward(
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
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv."""
    _require_plain(dropout_p, softcap, alibi_slopes)
    rule = _Rule(softmax_scale, causal, window_size_left, window_size_right)
    tensors = (dout, q, k, v, out, softmax_lse)
    grads = rule.backward(*tensors, None, None, q.shape[1], k.shape[1])
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)


def _flash_attn_varlen_backward(
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
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """Writes dq, dk and dv."""
    _require_plain(dropout_p, softcap, alibi_slopes)
    rule = _Rule(softmax_scale, causal, window_size_left, window_size_right)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    grads = rule.backward(dout, q, k, v, out, softmax_lse, *lengths)
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: "_Rule", *lengths: Any) -> Tensor:
        out, lse = rule.forward(q, k, v, *lengths)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rule, ctx.lengths = rule, lengths
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return *ctx.rule.backward(grads[0], *ctx.saved_tensors, *ctx.lengths), *[None] * 5


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """out `[tokens, H, D]`, differentiable."""
    _require_plain(dropout_p)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Varlen.apply(q, k, v, _Rule(scale, causal, *window_size), *lengths)


def flash_attn_func(*args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError("flash_attn_func isn't here: nothing that runs here calls it")


def _require_plain(dropout_p: float, softcap: float = 0.0, alibi: Tensor | None = None) -> None:
    if dropout_p or softcap or alibi is not None:
        raise NotImplementedError("dropout, softcap and ALiBi aren't here")


class _Rule:
    """Who sees whom, in FlashAttention's words: -1 is no bound, causal ends at the last key."""

    def __init__(self, scale: float, causal: bool, left: int, right: int) -> None:
        self.scale = scale
        self.left = None if left < 0 else left
        self.right = 0 if causal else None if right < 0 else right

    @property
    def _is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def _window(self) -> dict[str, int | None]:
        return {"window_size_left": self.left, "window_size_right": self.right}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> tuple[Tensor, Tensor]:
        """(out like q, lse). Lengths: cumulative ones of q and k, or None twice, and largest."""
        if not q.is_cuda:
            return self._forward_on_cpu(q, k, v, lengths)
        out, lse, *_ = _aten._flash_attention_forward(
            *_readable(q, k, v),
            *lengths,
            0.0,
            self._is_causal,
            False,
            scale=self.scale,
            **self._window(),
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *lengths: Any
    ) -> tuple[Tensor, ...]:
        """(dq, dk, dv)."""
        if not q.is_cuda:
            return self._backward_on_cpu(dout, q, k, v, out, lse, lengths)
        return _aten._flash_attention_backward(
            *_readable(dout, q, k, v, out),
            lse.contiguous(),
            *lengths,
            0.0,
            self._is_causal,
            # Without dropout the random state is not read, but the op wants tensors of this type.
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=self.scale,
            **self._window(),
        )

    def _how(self, q: Tensor, k: Tensor, lengths: Any) -> tuple[Any, ...]:
        """The arguments of this project's plain kernel."""
        from longctx_patch.kernels import Score, Segments
        from longctx_patch.kernels.base import Window

        rows, columns = (
            (whole,) if edges is None else tuple(edges.diff().tolist())
            for edges, whole in zip(lengths[:2], (q.shape[1], k.shape[1]), strict=True)
        )
        return Segments(rows, columns, Window(self.left, self.right)), Score(self.scale)

    def _forward_on_cpu(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Any
    ) -> tuple[Tensor, Tensor]:
        packed = q.ndim == 3
        q, k, v = (x[None] if packed else x for x in (q, k, v))
        out, lse = _plain_kernel().forward(q, k, v, *self._how(q, k, lengths))
        return (out[0], lse[0]) if packed else (out, lse)

    def _backward_on_cpu(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Any
    ) -> tuple[Tensor, ...]:
        packed = q.ndim == 3
        given = (x[None] if packed else x for x in (dout, q, k, v, out, lse))
        dout, q, k, v, out, lse = given
        grads = _plain_kernel().backward(dout, q, k, v, out, lse, *self._how(q, k, lengths))
        return tuple(grad[0] if packed else grad for grad in grads)


def _plain_kernel() -> Any:
    from longctx_patch.kernels import available

    return available()["torch_eager"]


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The ops read the last dim as contiguous, as the package sees to."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


_FUNCTIONS = {
    function.__name__: function
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
        flash_attn_func,
        flash_attn_varlen_func,
    )
}
