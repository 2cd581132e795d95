"""FlashAttention from packages: flash-attn 2, 3 and 4, each a record of one adapter.

* flash-attn 4 (CuTe) is the fastest on Hopper and Blackwell. It comes as a wheel and compiles
  itself at first use: a second or two for each combination of dtype, head dim, group of heads, kind
  of mask, segments or none, and softcap; and once more for blocks of a single tile, but not for any
  other length.
* flash-attn 3 is for Hopper and is built from source. Its Python functions have changed their
  arguments, its torch ops have not, so the ops are called.
* flash-attn 2 is also what torch's own flash op runs, though without softcap (`torch_flash`). On
  most platforms the package has to be compiled from source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.kernels.backends.varlen import lengths_of, window_keywords
from longctx_patch.kernels.base import (
    CAUSAL_WINDOW,
    BackwardInputs,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.kernels.installed import Package

_HALF = (torch.bfloat16, torch.float16)
_TAKES = Traits(segments=True, windows=True, tiles=False, softcap=True)


class Functions(NamedTuple):
    """A package's functions, for rows that are packed or not."""

    forward: Callable[..., Any]
    """(q, k, v, **keywords) to (out, lse, ...)."""
    backward: Callable[..., Any]
    """(dout, q, k, v, out, lse, **keywords) to (dq, dk, dv)."""


class Signature(NamedTuple):
    """Says how calls of one package's functions differ from those of other packages."""

    functions: Callable[[Any, bool], Functions]
    """The functions of the package's module; the flag says whether rows are packed."""
    causal: str = "causal"
    """The keyword for a causal mask."""
    no_bound: int | None = -1
    """The value that stands for a bound that a window does not have."""
    no_softcap: float | None = 0.0
    """The softcap that forward gets where scores are not capped; backward always gets 0."""
    forward: tuple[tuple[str, Any], ...] = ()
    """Further keywords of forward."""
    backward: tuple[tuple[str, Any], ...] = ()
    """Further keywords of backward."""


@dataclass(frozen=True, kw_only=True)
class FlashAttnKernel:
    """FlashAttention behind one package's functions."""

    name: str
    domain: Domain
    signature: Signature
    package: Package | None
    """None: torch itself has the functions."""
    refuses_also: Callable[[KernelRequest], str | None] | None = None
    deterministic: bool = False
    traits: Traits = _TAKES

    def refuses(self, request: KernelRequest) -> str | None:
        reason = unsupported(request, self.traits, self.domain)
        if reason is None and self.refuses_also is not None:
            reason = self.refuses_also(request)
        return reason or (None if self.package is None else self.package.problem())

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(segments, q_BLHD)
        keywords = self._keywords(segments, score, self.signature.no_softcap)
        out, lse, *_ = self._functions(segments).forward(
            *lengths.packed(q_BLHD, k_BMGD, v_BMGD),
            **dict(self.signature.forward),
            **keywords,
            **lengths.keywords,
        )
        return out.view(q_BLHD.shape), lengths.lse_by_batch(lse, q_BLHD.shape[0])

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = lengths_of(segments, given.q)
        keywords = self._keywords(segments, score, 0.0)
        if self.domain.deterministic:
            keywords["deterministic"] = self.deterministic
        dq, dk, dv = self._functions(segments).backward(
            *lengths.packed(*given[:5]),
            lengths.packed_lse(given.lse),
            **dict(self.signature.backward),
            **keywords,
            **lengths.keywords,
        )
        return dq.view(given.q.shape), dk.view(given.k.shape), dv.view(given.v.shape)

    def _functions(self, segments: Segments) -> Functions:
        module = None if self.package is None else self.package.load()
        return self.signature.functions(module, len(segments.q) > 1)

    def _keywords(
        self, segments: Segments, score: Score, no_softcap: float | None
    ) -> dict[str, Any]:
        keywords: dict[str, Any] = {
            "softmax_scale": score.scale,
            self.signature.causal: segments.rule == CAUSAL_WINDOW,
            **window_keywords(segments, absent=self.signature.no_bound),
        }
        if self.traits.softcap:
            keywords["softcap"] = score.softcap or no_softcap
        return keywords


def _writing(write: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Turn a backward that writes gradients to given tensors into one that returns them.

    What such a function returns has changed between versions; what it writes to has not.
    """

    def backward(dout: Tensor, *tensors: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        like = tensors[:3]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
        write(dout, *tensors, **dict(zip(("dq", "dk", "dv"), grads, strict=True)), **keywords)
        return tuple(grads)

    return backward


def _functions_of_2(module: Any, packed: bool) -> Functions:
    name = "_flash_attn_varlen" if packed else "_flash_attn"
    return Functions(
        getattr(module, f"{name}_forward"), _writing(getattr(module, f"{name}_backward"))
    )


def _functions_of_3(module: Any, packed: bool) -> Functions:
    ops = torch.ops.flash_attn_3  # which importing the module has registered

    def write(dout: Tensor, *tensors: Tensor, **keywords: Any) -> None:
        ops.bwd(dout.contiguous(), *tensors, **keywords)

    return Functions(ops.fwd, _writing(write))


def _functions_of_4(module: Any, packed: bool) -> Functions:
    def backward(dout: Tensor, *tensors: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        q, k, v, out, lse = tensors
        grads: tuple[Tensor, ...] = module._flash_attn_bwd(q, k, v, out, dout, lse, **keywords)
        return grads

    return Functions(module._flash_attn_fwd, backward)


def _refused_by_4(request: KernelRequest) -> str | None:
    """Head dims whose dq is wrong, and what Blackwell's kernels lack.

    Seen with 4.0.0b36 on H200: dq is off by 0.9 for 8, 16, 40, 48, 72, 80, 104 and 112, and right
    for all other multiples of 8 to 128 and for 160, 192, 224 and 256. The kernels for 10.x and 11.x
    take fewer head dims, and backward has hung with softcap:
    https://github.com/Dao-AILab/flash-attention/issues/2466
    """
    dim = request.head_dim
    padded = -(-dim // 16) * 16
    if padded % 32:
        return f"has a wrong dq for head dims that round up to {padded}, this one is {dim}"
    if torch.cuda.get_device_capability() < (10, 0):
        return None
    if dim > 128 and dim != 256:
        return f"takes head dims up to 128, and 256, on this GPU; this one is {dim}"
    if request.softcap:
        return "has hung in backward with a softcap of scores on Blackwell (flash-attention #2466)"
    return None


FLASH_ATTN_2 = FlashAttnKernel(
    name="flash_attn_2",
    domain=Domain("cuda", _HALF, max_head_dim=256, least_gpu=(8, 0)),
    signature=Signature(
        _functions_of_2,
        forward=(("dropout_p", 0.0), ("alibi_slopes", None), ("return_softmax", False)),
        backward=(("dropout_p", 0.0), ("alibi_slopes", None)),
    ),
    package=Package(
        distribution="flash-attn",
        module="flash_attn.flash_attn_interface",
        least="2.8.0",
        install='pip install --no-build-isolation "flash-attn>=2.8,<3"',
    ),
)
FLASH_ATTN_3 = FlashAttnKernel(
    name="flash_attn_3",
    # Builds before September 2025 drop the deterministic flag (flash-attention #1766, #1893), and
    # have the same version as later builds.
    domain=Domain(
        "cuda", _HALF, max_head_dim=256, deterministic=False, least_gpu=(9, 0), below_gpu=10
    ),
    signature=Signature(_functions_of_3, causal="is_causal", forward=(("num_splits", 1),)),
    package=Package(
        distribution="flash-attn-3",
        module="flash_attn_3._C",  # registers the ops
        least="3.0.0b1",
        install="build it in the folder hopper of github.com/Dao-AILab/flash-attention "
        "(python setup.py install), or take flash-attn-4, which comes as a wheel",
    ),
)
FLASH_ATTN_4 = FlashAttnKernel(
    name="flash_attn_4",
    # It has no backward on 8.x, and neither softcap nor a deterministic backward on 12.x.
    domain=Domain("cuda", _HALF, max_head_dim=256, least_gpu=(9, 0), below_gpu=12),
    signature=Signature(
        _functions_of_4, no_bound=None, no_softcap=None, forward=(("return_lse", True),)
    ),
    package=Package(
        distribution="flash-attn-4",
        module="flash_attn.cute.interface",
        least="4.0.0b36",
        install='pip install "flash-attn-4[cu13]==4.0.0b36" (for torch with CUDA 12 without '
        "[cu13])",
    ),
    refuses_also=_refused_by_4,
)
