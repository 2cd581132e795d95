"""torch's FlexAttention, compiled: windows, segments, tables and softcap on CUDA.

Its gradients come from autograd, so backward computes the block once more, and turns the global out
and lse into gradients of the block's own (`_own_gradients`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from longctx_patch.kernels.backends.flex_masks import block_mask, padded_size
from longctx_patch.kernels.base import (
    EVERYTHING,
    BackwardInputs,
    Domain,
    KernelRequest,
    Score,
    Segments,
    Traits,
    unsupported,
)
from longctx_patch.kernels.installed import lacks_gpu

Attend = Callable[[Tensor, Tensor, Tensor, Any, Score], tuple[Tensor, Tensor]]
"""(out_BHLD, lse_BHL) of q_BHLD, k_BGMD and v_BGMD under a `BlockMask`, differentiable in both."""


@dataclass(frozen=True)
class FlexKernel:
    """One algorithm; `attend`, which computes a block, can be replaced to test without a GPU."""

    attend: Attend | None = None
    """None: FlexAttention."""
    name: str = "flex"
    traits: Traits = EVERYTHING
    domain = Domain(
        "cuda",
        (torch.bfloat16, torch.float16, torch.float32),
        max_head_dim=256,
        head_dim_multiple=16,
        powers_of_2_only=True,
    )

    def refuses(self, request: KernelRequest) -> str | None:
        reason = unsupported(request, self.traits, self.domain)
        if reason is not None:
            return reason
        reason = lacks_gpu((7, 0))
        if reason is None and find_spec("triton") is None:
            return "needs the package triton: pip install triton"
        return reason

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        _, (out_BLHD, lse_BHL) = self._block(q_BLHD, k_BMGD, v_BMGD, segments, score)
        return out_BLHD.detach(), lse_BHL.detach()

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD, lse_BHL = given
        inputs, own = self._block(q_BLHD, k_BMGD, v_BMGD, segments, score)
        gradients = _own_gradients(dout_BLHD, out_BLHD, lse_BHL, *(x.detach() for x in own))
        dq, dk, dv = torch.autograd.grad(own, inputs, gradients)
        return dq, dk, dv

    def _block(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """The inputs as leaves of a graph, and (out_BLHD, lse_BHL) over these columns alone.

        Forward makes the graph too, though it needs none: without one it would be compiled again.
        Hooks of a checkpointed layer around the call must not see what this graph saves, since a
        recompute that takes kept results back doesn't come here. An output that is saved as it
        is would keep its graph, and so itself, for ever: it is detached.
        """
        rows = q_BLHD.shape[1]
        mask = block_mask(segments, q_BLHD.device)
        inputs = tuple(x.detach().requires_grad_() for x in (q_BLHD, k_BMGD, v_BMGD))
        with torch.enable_grad(), saved_tensors_hooks(_detached, _as_it_is):
            q, k, v = (_padded(x).transpose(1, 2) for x in inputs)
            out_BHLD, lse_BHL = (self.attend or _flex)(q, k, v, mask, score)
            own = out_BHLD[:, :, :rows].transpose(1, 2), lse_BHL[:, :, :rows]
        return inputs, own


def _own_gradients(
    dout_BLHD: Tensor, out_BLHD: Tensor, lse_BHL: Tensor, own_out: Tensor, own_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a block's own out and lse that give its share of the global gradients.

    With w = exp(own_lse - lse), the global probabilities are p = w * own_p. What is wanted,
    `dv = p^T dout` and `dscores = p (dout v^T - rowsum(dout out))`, is what autograd makes,
    `own_p^T own_dout` and `own_p (own_dout v^T - rowsum(own_dout own_out) + own_dlse)`, with
    `own_dout = w dout` and `own_dlse = rowsum(own_dout own_out) - w rowsum(dout out)`.
    """
    wide = lse_BHL.dtype
    weight_BHL = torch.exp(own_lse - lse_BHL)
    own_dout = (dout_BLHD * weight_BHL.transpose(1, 2)[..., None]).to(dout_BLHD.dtype)
    own_delta_BLH = (own_dout.to(wide) * own_out.to(wide)).sum(-1)
    delta_BLH = (dout_BLHD.to(wide) * out_BLHD.to(wide)).sum(-1)
    own_dlse = own_delta_BLH.transpose(1, 2) - weight_BHL * delta_BLH.transpose(1, 2)
    return own_dout, own_dlse


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _padded(x_BLHD: Tensor) -> Tensor:
    """Pad to whole blocks, with rows that nothing sees and that see nothing."""
    missing = padded_size(x_BLHD.shape[1]) - x_BLHD.shape[1]
    return F.pad(x_BLHD, (0, 0, 0, 0, 0, missing)) if missing else x_BLHD


def _flex(
    q_BHLD: Tensor, k_BGMD: Tensor, v_BGMD: Tensor, mask: Any, score: Score
) -> tuple[Tensor, Tensor]:
    numbers = _numbers(score, q_BHLD.device)
    # There is a compilation for each combination of: square or not, batch of one or more, runs or
    # table, softcap or not, dtype and heads. torch gives up after 8 unless told otherwise.
    with torch._dynamo.config.patch(recompile_limit=64):
        return _compiled()(q_BHLD, k_BGMD, v_BGMD, mask, numbers.scale, numbers.softcap)


class _Numbers(NamedTuple):
    """A score's numbers as tensors: as Python floats, each would be compiled into a kernel."""

    scale: Tensor
    softcap: Tensor | None


@lru_cache(maxsize=256)
def _numbers(score: Score, device: torch.device) -> _Numbers:
    softcap = None if score.softcap is None else torch.tensor(score.softcap, device=device)
    return _Numbers(torch.tensor(score.scale, device=device), softcap)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiled once for all lengths; Triton and the compiler are loaded at first use."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Tensor, softcap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        def scaled(s: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return s * scale

        def capped(s: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(s * (scale / softcap))

        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=scaled if softcap is None else capped,
            block_mask=mask,
            scale=1.0,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None
        return out, aux.lse

    # Without fullgraph, masks beyond the limit would silently run uncompiled, in quadratic memory.
    return torch.compile(attend, dynamic=True, fullgraph=True)
