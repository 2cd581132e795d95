"""Describes what a kernel does and what is asked of it.

Shapes: B batch, L query tokens, M key tokens, H query heads, G key-value heads (G divides H),
D head dim. Rows are packed: segment after segment along the tokens, the same in every row of the
batch. Every row of a segment sees one column or more.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longctx_patch.kernels.installed import lacks_gpu
from longctx_patch.sequence.regions import Tile


class Score(NamedTuple):
    """Says how a dot product `s` becomes what the softmax sees, before masking."""

    scale: float
    softcap: float | None = None
    """`softcap * tanh(s * scale / softcap)` instead of `s * scale` (Gemma 2)."""


class Window(NamedTuple):
    """A window as FlashAttention counts it: the last of n rows ends at the last of m columns.

    Row `i` sees column `j` if `-left <= j - (i + m - n) <= right`; None: no bound. The token itself
    is not counted, unlike the windows of transformers.
    """

    left: int | None
    right: int | None


FULL_WINDOW = Window(None, None)
CAUSAL_WINDOW = Window(None, 0)


class Segments(NamedTuple):
    """Rows `q[n]` attend to columns `kv[n]`, for each n, all by one rule."""

    q: tuple[int, ...]
    """Number of rows of each segment; their sum is L."""
    kv: tuple[int, ...]
    """Number of columns of each segment; their sum is M."""
    rule: Window | Tile
    """A tile comes with one segment; a window that hides pairs comes with n <= m."""


class Traits(NamedTuple):
    """Says what a kernel takes besides one segment that is full or causal and square, as all do."""

    segments: bool
    """It takes more than one segment, of any lengths."""
    windows: bool
    """It takes any window, even where n is less than m."""
    tiles: bool
    """It takes a table of bits."""
    softcap: bool


EVERYTHING = Traits(segments=True, windows=True, tiles=True, softcap=True)


class KernelRequest(NamedTuple):
    """Says what a kernel must be able to compute, the same on every rank of a group.

    The fields up to `tiles`, and `deterministic`, decide which kernels can compute it; the others
    decide which kernel is fastest.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False
    tiles: bool = False
    pieces: bool = False
    """The mask is not plain causal: many short pieces or windows."""
    deterministic: bool = False
    """Two runs on the same GPUs must be bitwise equal."""
    num_heads: int = 32
    """About how many query heads a rank has."""
    num_kv_heads: int = 8
    num_rows: int = 8192
    """About how many query tokens a block has."""


class Domain(NamedTuple):
    """The tensors that a kernel takes, whatever the mask."""

    device_type: str | None
    """None: any."""
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    """None: any."""
    head_dim_multiple: int = 8
    powers_of_2_only: bool = False
    """It takes only head dims that are powers of 2."""
    deterministic: bool = True
    """Its backward can sum in the same order in every run."""
    least_gpu: tuple[int, int] | None = None
    """The lowest compute capability that it runs on; None: not checked."""
    below_gpu: int | None = None
    """The first major version of the compute capability that it no longer runs on, if any."""


class BackwardInputs(NamedTuple):
    """The tensors from which backward is computed.

    `out` and `lse` are the global ones: over all keys of all ranks, a sink included. A kernel uses
    them as `p = exp(scores - lse)` and `rowsum(dout * out)`.
    """

    dout: Tensor
    """`[B, L, H, D]`, like q and out."""
    q: Tensor
    k: Tensor
    """`[B, M, G, D]`, like v."""
    v: Tensor
    out: Tensor
    lse: Tensor
    """`[B, H, L]`."""


class Kernel(Protocol):
    """One backend."""

    @property
    def name(self) -> str: ...

    @property
    def traits(self) -> Traits: ...

    @property
    def domain(self) -> Domain: ...

    def refuses(self, request: KernelRequest) -> str | None:
        """Says why this kernel can't do it, or None if it can."""
        ...

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL in float32 or, for float64 inputs, float64)."""
        ...

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """These segments' share of (dq_BLHD, dk_BMGD, dv_BMGD), in the dtypes of q, k and v."""
        ...


def unsupported(request: KernelRequest, traits: Traits, domain: Domain) -> str | None:
    """The first thing that a request asks and the kernel or this machine's GPU lacks, in words."""
    if domain.device_type not in (None, request.device_type):
        return f"needs device {domain.device_type}, tensors are on {request.device_type}"
    if request.dtype not in domain.dtypes:
        names = ", ".join(dtype_name(dtype) for dtype in domain.dtypes)
        return f"takes {names}, tensors are {dtype_name(request.dtype)}"
    most, step = domain.max_head_dim, domain.head_dim_multiple
    if most is not None and (request.head_dim > most or request.head_dim % step):
        return (
            f"takes head dims up to {most} that are a multiple of {step}, "
            f"this one is {request.head_dim}"
        )
    if domain.powers_of_2_only and request.head_dim & (request.head_dim - 1):
        return f"takes head dims that are a power of two, this one is {request.head_dim}"
    if request.softcap and not traits.softcap:
        return "has no softcap of scores"
    if request.tiles and not traits.tiles:
        return "takes no tables of allowed pairs"
    if request.deterministic and not domain.deterministic:
        return "has no deterministic backward"
    return None if domain.least_gpu is None else lacks_gpu(domain.least_gpu, domain.below_gpu)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
