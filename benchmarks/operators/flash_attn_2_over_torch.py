"""Replaces the package flash-attn 2 where it isn't installed, for the peers that import it.

torch ships the same FlashAttention-2 kernels as ops (`aten::_flash_attention_forward`), so peers
run without building the package. The package writes gradients into given tensors, but the ops
return new ones, so each backward copies dq, dk and dv once more (1 to 2 % of a block of 16,384
tokens on an H200). On CPU, for trying the scripts and for tests, plain torch computes the same.

Only what ring-flash-attn 0.1.8, yunchang 0.6.4 and tests use is here.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"  # the version whose signatures these are
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_RULE = (
    "dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None"
)
_GIVEN = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_UNUSED = "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"


def install() -> str:
    """Make `import flash_attn` work; returns which one it is.

    The package itself is taken where it is installed. Otherwise an installed flash-attn 4, which
    has the same top-level name but none of these functions, is hidden from this process.
    """
    if "flash_attn" not in sys.modules and _package_is_there():
        import flash_attn

        return f"flash-attn {flash_attn.__version__}"
    if getattr(sys.modules.get("flash_attn"), "is_over_torch", None) is None:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        for module in (package, interface):
            module.__spec__ = ModuleSpec(module.__name__, None)
            module.__dict__.update(FUNCTIONS)
        package.__dict__.update(
            __version__=VERSION, __path__=[], is_over_torch=True, flash_attn_interface=interface
        )
        sys.modules |= {module.__name__: module for module in (package, interface)}
    return "torch's FlashAttention-2 ops"


def _package_is_there() -> bool:
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None


def function(name: str, parameters: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function with parameters such as "q, k, softcap=0.0", which calls `run` with their names.

    Peers read the parameters with `inspect`.
    """
    signature = inspect.signature(eval(f"lambda {parameters}: None"))

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return run(**bound.arguments)

    call.__name__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor, None, None]:
    """(out like q, lse, None, None); lse is `[B, H, L]` or, for packed rows, `[H, tokens]`."""
    from longctx_patch.kernels.backends.torch_flash import flash_forward

    if q.is_cuda:
        out, lse, *_ = flash_forward(*_readable(q, k, v), **_on_cuda(**how))
        return out, lse, None, None
    packed = q.ndim == 3
    tensors = (x[None] if packed else x for x in (q, k, v))
    out, lse = _plain_kernel().forward(*tensors, *_on_cpu(q, k, **how))
    return (out[0], lse[0], None, None) if packed else (out, lse, None, None)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **how: Any
) -> tuple[Tensor, ...]:
    """(dq, dk, dv)."""
    from longctx_patch.kernels import BackwardInputs
    from longctx_patch.kernels.backends.torch_flash import flash_backward

    if q.is_cuda:
        tensors = (*_readable(dout, q, k, v, out), softmax_lse.contiguous())
        return flash_backward(*tensors, **_on_cuda(**how))
    packed = q.ndim == 3
    given = (x[None] if packed else x for x in (dout, q, k, v, out, softmax_lse))
    grads = _plain_kernel().backward(BackwardInputs(*given), *_on_cpu(q, k, **how))
    return tuple(grad[0] if packed else grad for grad in grads)


def _write(dq: Tensor, dk: Tensor, dv: Tensor, **given: Any) -> None:
    for buffer, grad in zip((dq, dk, dv), backward(**given), strict=True):
        buffer.copy_(grad)


def _on_cuda(
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The keywords of this project's functions over torch's ops."""
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("dropout, softcap and ALiBi aren't here")
    left = None if window_size_left < 0 else window_size_left
    right = 0 if causal else None if window_size_right < 0 else window_size_right
    lengths = {name: others[name] for name in _LENGTHS.split(", ") if name in others}
    return lengths | {
        "softmax_scale": softmax_scale,
        "causal": left is None and right == 0,
        "window_size_left": left,
        "window_size_right": right,
    }


def _on_cpu(q: Tensor, k: Tensor, softcap: float | None = 0.0, **how: Any) -> tuple[Any, Any]:
    """The segments and the score of this project's plain kernel, which has softcap too."""
    from longctx_patch.kernels import Score, Segments, Window

    rule = _on_cuda(**how)
    rows, columns = (
        (whole,) if edges is None else tuple(edges.diff().tolist())
        for edges, whole in (
            (rule.get("cu_seqlens_q"), q.shape[1]),
            (rule.get("cu_seqlens_k"), k.shape[1]),
        )
    )
    window = Window(rule["window_size_left"], rule["window_size_right"])
    return Segments(rows, columns, window), Score(rule["softmax_scale"], softcap or None)


def _plain_kernel() -> Any:
    from longctx_patch.kernels import available

    return available()["reference"]


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make last dims contiguous, as the ops need and the package does by itself."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
        out, lse, *_ = forward(q, k, v, **how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return *backward(grads[0], *ctx.saved_tensors, **ctx.how), None


def _differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    **how: Any,
) -> Tensor:
    """out `[tokens, H, D]`."""
    how["softmax_scale"] = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    how["window_size_left"], how["window_size_right"] = window_size
    out: Tensor = _Varlen.apply(q, k, v, how)
    return out


def _missing(**_: Any) -> None:
    raise NotImplementedError("flash_attn_func isn't here: nothing that runs here calls it")


FUNCTIONS = {
    name: function(name, parameters, run)
    for name, parameters, run in (
        ("_flash_attn_forward", f"q, k, v, {_RULE}, return_softmax=False", forward),
        (
            "_flash_attn_varlen_forward",
            f"q, k, v, {_LENGTHS}, {_RULE}, return_softmax=False, {_UNUSED}",
            forward,
        ),
        (
            "_flash_attn_backward",
            f"{_GIVEN}, {_RULE}, deterministic=False, rng_state=None",
            _write,
        ),
        (
            "_flash_attn_varlen_backward",
            f"{_GIVEN}, {_LENGTHS}, {_RULE}, deterministic=False, rng_state=None, "
            "zero_tensors=False",
            _write,
        ),
        (
            "flash_attn_varlen_func",
            f"q, k, v, {_LENGTHS}, dropout_p=0.0, softmax_scale=None, causal=False, "
            "window_size=(-1, -1)",
            _differentiable,
        ),
        ("flash_attn_func", "*args, **kwargs", _missing),
    )
}
