"""Any finite scale is exact, also below 0 and 0 itself, which kernels alone turn into NaN; what is
no number is refused, whether ranks are compared or not."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longctx_patch import (
    LongContextConfig,
    attention,
    make_sequence_group,
    run_virtual_ranks,
    virtual_group,
)
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import prefix_lm
from tests.masked import dense_masked
from tests.reference import relative_error

LENGTH, PREFIX, HEADS = 29, 5, 4


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, heads, 8) for heads in (HEADS, 2, 2, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("scale", [-0.4, -0.0, 0, 1e-60, -1e-60])
@pytest.mark.parametrize(
    ("kernel", "softcap", "is_prefix"),
    [("auto", None, False), ("auto", None, True), ("torch_eager", 2.0, False)],
)
def test_scales_of_0_and_below_are_exact(
    scale: float, kernel: Any, softcap: float | None, is_prefix: bool
) -> None:
    """A mask makes hidden pairs -inf before a kernel scales them; four ranks share the row."""
    config = LongContextConfig(ulysses_degree=2, ring_degree=2, kernel=kernel)

    def rank(transport: Any) -> list[Tensor]:
        group = virtual_group(transport, config)
        layout = group.layout(LENGTH)
        q, k, v, dout = (layout.shard(x, group.group_rank, 1) for x in tensors(torch.float64))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = attention(
            *leaves,
            group=group,
            num_tokens=LENGTH,
            mask=prefix_lm(LENGTH, PREFIX) if is_prefix else None,
            softcap=softcap,
            softmax_scale=scale,
        )
        return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]

    found = run_virtual_ranks(4, rank)
    layout = config.layout_of(Documents.one(LENGTH))
    rows, columns = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    table = (columns <= rows) | (is_prefix & (columns < PREFIX))
    q, k, v, dout = tensors(torch.float64)
    dense = dense_masked(q, k, v, dout, table, softcap=softcap, scale=scale)
    for number, wanted in enumerate(dense.values()):
        shards = [result[number] for result in found]
        whole = layout.unshard(shards, 2 if number == 1 else 1)
        assert whole.isfinite().all()
        if wanted.abs().max() < 1e-30:  # gradients through a scale of 0
            assert whole.abs().max() < 1e-30
        else:
            assert relative_error(whole, wanted) < 1e-10


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, "0.5"])
@pytest.mark.parametrize("check_ranks", [True, False])
def test_what_is_no_scale_is_refused(scale: Any, check_ranks: bool) -> None:
    q, k, v, _ = tensors(torch.float32)
    group = make_sequence_group(LongContextConfig())
    with pytest.raises(ValueError, match=r"softmax_scale=.*give a finite number of float32"):
        attention(q, k, v, group=group, softmax_scale=scale, check_ranks=check_ranks)
