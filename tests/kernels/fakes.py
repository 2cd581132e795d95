"""The functions of the flash-attn packages on CPU, in plain torch, and the adapters over them.

Names and parameters are the packages' own (without some that training has no use for), so that an
argument under a wrong name is a TypeError here as there, and so are their demands. What they
compute is that of the kernel `reference`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longctx_patch.kernels import BackwardInputs, Kernel, Score, Segments, Window, available
from longctx_patch.kernels.backends.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from longctx_patch.kernels.installed import Package

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_FA2_RULE = (
    "dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None"
)
_FA2_GIVEN = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_FA2_UNUSED = "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
FA2 = {
    "_flash_attn_forward": f"q, k, v, {_FA2_RULE}, return_softmax=False",
    "_flash_attn_varlen_forward": f"q, k, v, {', '.join(LENGTHS)}, {_FA2_RULE}, "
    f"return_softmax=False, {_FA2_UNUSED}",
    "_flash_attn_backward": f"{_FA2_GIVEN}, {_FA2_RULE}, deterministic=False, rng_state=None",
    "_flash_attn_varlen_backward": f"{_FA2_GIVEN}, {', '.join(LENGTHS)}, {_FA2_RULE}, "
    "deterministic=False, rng_state=None, zero_tensors=False",
}
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
FA4_FORWARD = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
    "causal=False, softcap=None, window_size_left=None, window_size_right=None, "
    "learnable_sink=None, return_lse=False"
)
FA4_BACKWARD = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
    "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
    "num_threads=256, pack_gqa=False, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, deterministic=False"
)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> None:
    """Assert what all packages require of the tensors and their lengths."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert isinstance(how["softmax_scale"], float)
    assert isinstance(how["causal"], bool)
    edges: list[Any] = [how.get(name) for name in LENGTHS[:2]]
    if edges[0] is None:
        assert edges == [None, None]
        assert q.ndim == k.ndim == 4
        rows, columns = [q.shape[1]], [k.shape[1]]
    else:
        assert q.ndim == k.ndim == 3
        rows, columns = (
            _lengths(given, how[name], x)
            for given, name, x in zip(edges, LENGTHS[2:], (q, k), strict=True)
        )
    if how["causal"] or (how["window_size_left"], how["window_size_right"]) != (-1, -1):
        assert all(n <= m for n, m in zip(rows, columns, strict=True)), "fails with more rows"


def _lengths(edges: Tensor, longest: int, x_THD: Tensor) -> list[int]:
    assert edges.dtype == torch.int32
    assert edges.is_contiguous()
    assert edges[-1] == x_THD.shape[0]
    lengths: list[int] = edges.diff().tolist()
    assert type(longest) is int
    assert longest == max(lengths)
    return lengths


def check_results(dout: Tensor, out: Tensor, softmax_lse: Tensor, q: Tensor) -> None:
    """Assert what all packages require of dout and of forward's results in backward."""
    assert dout.dtype == out.dtype == q.dtype
    assert dout.shape == out.shape == q.shape
    assert dout.stride(-1) == out.stride(-1) == 1
    tokens = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    assert softmax_lse.shape == tokens
    assert softmax_lse.dtype == torch.float32
    assert softmax_lse.is_contiguous()


def forward(**given: Any) -> tuple[Any, ...]:
    """(out like q, lse, None, None) under the packages' requirements; absent bounds are -1.

    The lse is `[B, H, L]` or, for packed rows, `[H, tokens]`.
    """
    assert type(given["window_size_left"]) is type(given["window_size_right"]) is int
    check_inputs(**given)
    assert given.get("num_splits", 1) == 1
    packed = given["q"].ndim == 3
    q, k, v = (given[name][None] if packed else given[name] for name in "qkv")
    out, lse = available()["reference"].forward(q, k, v, *_on_cpu(**given))
    return (out[0], lse[0], None, None) if packed else (out, lse, None, None)


def backward(**given: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv) under the packages' requirements."""
    check_inputs(**given)
    check_results(*(given[name] for name in ("dout", "out", "softmax_lse", "q")))
    assert isinstance(given["softcap"], float)
    packed = given["q"].ndim == 3
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    inputs = BackwardInputs(*(x[None] if packed else x for x in tensors))
    grads = available()["reference"].backward(inputs, *_on_cpu(**given))
    return tuple(grad[0] if packed else grad for grad in grads)


def _on_cpu(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    **others: Any,
) -> tuple[Segments, Score]:
    """What the plain kernel is told in place of a package's arguments."""
    assert not others.get("dropout_p")
    assert others.get("alibi_slopes") is None
    rows, columns = (
        (whole,) if edges is None else tuple(edges.diff().tolist())
        for edges, whole in (
            (others.get("cu_seqlens_q"), q.shape[1]),
            (others.get("cu_seqlens_k"), k.shape[1]),
        )
    )
    left = None if window_size_left < 0 else window_size_left
    right = 0 if causal else None if window_size_right < 0 else window_size_right
    return Segments(rows, columns, Window(left, right)), Score(softmax_scale, softcap or None)


def write(dq: Tensor, dk: Tensor, dv: Tensor, **given: Any) -> Tensor:
    """Write the gradients into the buffers that the caller gave."""
    for buffer, grad in zip((dq, dk, dv), backward(**given), strict=True):
        assert buffer.shape == grad.shape
        assert buffer.is_contiguous()
        buffer.copy_(grad)
    lse: Tensor = given["softmax_lse"]
    return lse.clone()


@dataclass
class Calls:
    """The names of the functions called, and the values of `deterministic` they got."""

    names: list[str] = field(default_factory=list)
    deterministic: list[bool] = field(default_factory=list)

    def noted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **given: Any) -> Any:
            self.names.append(name)
            if "deterministic" in given:
                self.deterministic.append(given["deterministic"])
            return run(*args, **given)

        return noting


def flash_attn_2(calls: Calls | None = None) -> Any:
    """Module `flash_attn.flash_attn_interface` of 2.8.3."""
    module = SimpleNamespace()
    for name, parameters in FA2.items():
        _put(module, name, parameters, forward if name.endswith("forward") else write, calls)
    return module


def flash_attn_4(calls: Calls | None = None) -> Any:
    """Module `flash_attn.cute.interface` of 4.0.0b36. Absent bounds are None."""

    def run_forward(*, return_lse: bool, **given: Any) -> tuple[Any, ...]:
        out, lse, *_ = forward(**_with_bounds(given))
        return out, lse if return_lse else None, None, None, None

    def run_backward(*, lse: Tensor, **given: Any) -> tuple[Tensor, ...]:
        return backward(**_with_bounds(given), softmax_lse=lse)

    module = SimpleNamespace()
    _put(module, "_flash_attn_fwd", FA4_FORWARD, run_forward, calls)
    _put(module, "_flash_attn_bwd", FA4_BACKWARD, run_backward, calls)
    return module


@contextmanager
def flash_attn_3_ops(calls: Calls | None = None) -> Iterator[None]:
    """The ops `torch.ops.flash_attn_3` (`hopper/flash_api.cpp`), on CPU."""
    library = torch.library.Library("flash_attn_3", "DEF")
    for name, schema, run in (
        ("fwd", FA3_FORWARD, forward),
        ("bwd", FA3_BACKWARD, write),
    ):
        library.define(schema)
        library.impl(
            name, _over_schema(schema, (calls or Calls()).noted(f"fa3.{name}", run)), "CPU"
        )
    try:
        yield
    finally:
        library._destroy()


def _put(
    module: Any, name: str, parameters: str, run: Callable[..., Any], calls: Calls | None
) -> None:
    setattr(module, name, _function(parameters, (calls or Calls()).noted(name, run)))


def _function(parameters: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function with parameters such as "q, k, softcap=0.0", which calls `run` with their names.

    The adapters read the parameters with `inspect`.
    """
    signature = inspect.signature(eval(f"lambda {parameters}: None"))

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return run(**bound.arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _with_bounds(given: dict[str, Any]) -> dict[str, Any]:
    sides = ("window_size_left", "window_size_right")
    return given | {side: -1 if given[side] is None else given[side] for side in sides}


def _over_schema(schema: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, called with an op's arguments by name and the schema's defaults for the rest."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return run(**given, causal=given.pop("is_causal"))

    return call


@dataclass(frozen=True)
class LoadedPackage(Package):
    """A package that counts as installed."""

    content: Any = field(default=None, compare=False)

    def problem(self) -> str | None:
        return None

    def load(self) -> Any:
        return self.content


def loaded(content: Any) -> LoadedPackage:
    return LoadedPackage("fake", "fake", "0", "nothing", content)


def fake_kernels() -> dict[str, Kernel]:
    """The adapters over these functions; flash_attn_3 needs `flash_attn_3_ops` around it."""
    return {
        "flash_attn_4": replace(FLASH_ATTN_4, package=loaded(flash_attn_4())),
        "flash_attn_3": replace(FLASH_ATTN_3, package=loaded(None)),
        "flash_attn_2": replace(FLASH_ATTN_2, package=loaded(flash_attn_2())),
    }
