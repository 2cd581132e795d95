"""cuDNN's flash attention through torch. It takes GQA without repeated heads, and a merged out and
lse.

torch does not pass its deterministic switch to cuDNN, so there is no deterministic backward.
"""

from math import prod

import torch
from torch import Tensor

from longctx_patch.kernels.backends.dense import DenseKernel
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
from longctx_patch.kernels.installed import lacks_gpu
from longctx_patch.kernels.run import MOST_NUMBERS

_aten = torch.ops.aten

COMMON_HEAD_DIM = 128
"""Wider heads have kernels for Hopper alone."""
GAP = 64
"""Unused numbers after each row of a batch: rows stay as aligned as they were, to 128 bytes."""


class CudnnKernel:
    name = "cudnn"
    traits = Traits(segments=False, windows=False, tiles=False, softcap=False)
    domain = Domain(
        "cuda",
        (torch.bfloat16, torch.float16),
        max_head_dim=256,
        deterministic=False,
        least_gpu=(8, 0),
    )

    def refuses(self, request: KernelRequest) -> str | None:
        problem = unsupported(request, self.traits, self.domain)
        if problem is not None or request.head_dim <= COMMON_HEAD_DIM:
            return problem
        lack = lacks_gpu((9, 0), 10)
        return lack and f"{lack}, for head dims above {COMMON_HEAD_DIM}"

    def forward(
        self, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL1, *_ = _aten._scaled_dot_product_cudnn_attention(
            q_BLHD.transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            None,
            True,
            0.0,
            segments.rule == CAUSAL_WINDOW,
            False,
            scale=score.scale,
        )
        return out_BHLD.transpose(1, 2), lse_BHL1.squeeze(-1)

    def backward(
        self, given: BackwardInputs, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_BLHD, q_BLHD, k_BMGD, v_BMGD, out_BLHD, lse_BHL = given
        if q_BLHD.shape[1] == k_BMGD.shape[1] == 1:  # cuDNN refuses a single pair
            return DenseKernel("torch_eager", None).backward(given, segments, score)
        if (reached := _reached(q_BLHD.shape)) > MOST_NUMBERS:
            raise ValueError(
                f"kernel='cudnn': {q_BLHD.shape[1]:,} queries of {q_BLHD.shape[2]} heads take "
                f"{reached:,} numbers, and its gradients are wrong beyond {MOST_NUMBERS:,}. Share "
                "the row between more GPUs, or use kernel='flash_attn_4' or 'torch_flash'."
            )
        # torch keeps a compiled graph by the layouts of q, k and v alone: where out or dout had
        # another one in an earlier call, it silently reads the wrong entries (torch 2.11, whose own
        # attention takes cuDNN first on Hopper). So all calls from here have one layout, and share
        # graphs with no other call, by a stride of q that stock layers don't give it.
        # Without dropout the random state is not read, but the op wants tensors.
        philox = torch.empty((), dtype=torch.int64, device=q_BLHD.device)
        grads_BHLD = _aten._scaled_dot_product_cudnn_attention_backward(
            _dense(dout_BLHD).transpose(1, 2),
            _apart(q_BLHD).transpose(1, 2),
            k_BMGD.transpose(1, 2),
            v_BMGD.transpose(1, 2),
            _dense(out_BLHD).transpose(1, 2),
            _dense(lse_BHL)[..., None],
            philox,
            philox,
            None,
            None,
            None,
            q_BLHD.shape[1],
            k_BMGD.shape[1],
            0.0,
            segments.rule == CAUSAL_WINDOW,
            scale=score.scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads_BHLD)
        return dq, dk, dv


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous, with the usual strides also along dims of size 1."""
    shape = tensor.shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tensor.contiguous().as_strided(shape, strides)


def _reached(shape: torch.Size) -> int:
    """Numbers from the first to the last one of `_apart`'s queries."""
    batch, row = shape[0], prod(shape[1:])
    return (batch - 1) * (row + GAP) + row


def _apart(q_BLHD: Tensor) -> Tensor:
    """The same numbers in dense rows, with `GAP` unused numbers after each.

    With a batch of one that is a view of what is dense.
    """
    batch, num_tokens, num_heads, dim = q_BLHD.shape
    row = num_tokens * num_heads * dim
    strides = (row + GAP, num_heads * dim, dim, 1)
    if batch == 1:
        return _dense(q_BLHD).as_strided(q_BLHD.shape, strides)
    apart = q_BLHD.new_empty(batch * (row + GAP)).as_strided(q_BLHD.shape, strides)
    return apart.copy_(q_BLHD)
