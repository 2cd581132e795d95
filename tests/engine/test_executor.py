"""Backward gets row dots of dout and out (delta) in place of `out`."""

import pytest
import torch

from longctx_patch.engine.executor import out_with_row_dots, row_dots
from tests.reference import relative_error


@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-24, 1e-30, 1e-37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_survives_tiny_gradients(size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 1, 64, 4, 32, generator=generator, dtype=torch.float64)
    dout = (dout * size).to(dtype)
    delta = (dout.double() * out).sum(-1)
    found = out_with_row_dots(dout, delta.float())
    assert relative_error((dout.double() * found.double()).sum(-1) / size, delta / size) < 0.01


def test_delta_in_place_of_out_is_as_accurate() -> None:
    """Delta from the shortest out that has it is as accurate as delta from the true out."""
    generator = torch.Generator().manual_seed(0)
    dout, out = torch.randn(2, 1, 2048, 4, 64, generator=generator)
    dout = dout.bfloat16()
    dout[:, 0] = 0  # a row without gradient has delta 0, whatever its out is
    delta = (dout.double() * out.double()).sum(-1)
    found = row_dots(dout, out_with_row_dots(dout, delta.float()))
    rounded = row_dots(dout, out.bfloat16())
    assert torch.isfinite(found).all()
    assert (found - delta).norm() <= (rounded - delta).norm()
    in_float32 = row_dots(dout.float(), out_with_row_dots(dout.float(), delta.float()))
    assert relative_error(in_float32, delta) < 1e-6
