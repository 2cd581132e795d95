"""causal-conv1d counts places with 32 bits: convolutions of more numbers run in pieces."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx_patch.engine.chain import convolution
from longctx_patch.engine.chain.convolution import in_pieces
from longctx_patch.engine.chain.extents import extent

ROWS, CHANNELS, TOKENS, REACH, WIDTH, MOST = 2, 6, 41, 3, 20, 80


def convolve(hidden_BCL: Tensor, before_BCR: Tensor | None, weight: Tensor) -> Tensor:
    if before_BCR is None:
        before_BCR = hidden_BCL.new_zeros(*hidden_BCL.shape[:2], REACH)
    joined = torch.cat([before_BCR, hidden_BCL], dim=2)
    return F.conv1d(joined, weight, groups=CHANNELS)


def in_memory(is_part: bool) -> Tensor:
    """`[B, C, L]`, as a linear layer makes it, or a part of what it makes."""
    made = torch.randn(ROWS, TOKENS, WIDTH if is_part else CHANNELS, dtype=torch.float64)
    return made[..., :CHANNELS].transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("begins", "is_part"), list(product([True, False], repeat=2)))
def test_pieces_are_exact_and_can_be_counted(
    begins: bool, is_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "MOST_UNSIGNED_PLACES", MOST)
    hidden, calls = in_memory(is_part), list[tuple[int, ...]]()
    weight = torch.randn(CHANNELS, 1, REACH + 1, dtype=torch.float64)
    before = None if begins else torch.randn(ROWS, CHANNELS, REACH, dtype=torch.float64)
    inputs = (hidden,) if before is None else (hidden, before.requires_grad_())

    def kernel(hidden_BCL: Tensor, before_BCR: Tensor | None) -> Tensor:
        assert extent(hidden_BCL) + REACH * CHANNELS <= MOST
        assert hidden_BCL.stride(1) == 1
        calls.append(hidden_BCL.shape)
        out = convolve(hidden_BCL, before_BCR, weight)
        out.register_hook(lambda grad: calls.append((extent(grad),)))
        return out

    out = in_pieces(kernel, REACH)(hidden, before)
    wanted = convolve(hidden, before, weight)
    # As a linear layer gives it, which is where a convolution's gradient comes from.
    dout = torch.randn(ROWS, TOKENS, CHANNELS, dtype=torch.float64).transpose(1, 2)
    assert out.stride(1) == 1
    all_found = (out, *torch.autograd.grad(out, inputs, dout))
    all_wanted = (wanted, *torch.autograd.grad(wanted, inputs, dout))
    for found, right in zip(all_found, all_wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    shapes, extents = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    tokens = MOST // CHANNELS - REACH
    pieces = [tokens] * (TOKENS // tokens) + [TOKENS % tokens]
    assert shapes == [(1, CHANNELS, piece) for _ in range(ROWS) for piece in pieces]
    assert all(each <= MOST for (each,) in extents)


def test_what_can_be_counted_is_handed_on_as_it_is() -> None:
    hidden, before = in_memory(True), torch.zeros(1)
    given = in_pieces(lambda *inputs: inputs, REACH)(hidden, before)  # type: ignore[arg-type]
    assert given[0] is hidden
    assert given[1] is before
