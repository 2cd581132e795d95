"""mamba-ssm's kernels count with 32 bits: what needs more is refused, or an input is copied."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.engine.chain import state_space
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.sequence.layout import Interval

TOKENS, HEADS, DIM, GROUPS, STATE, WIDTH = 32, 4, 8, 2, 4, 96
EVERY = Interval(0, TOKENS)


def scan(seen: list[tuple[Tensor, ...]], chunk: int = 8, *, is_kernel: bool = True) -> StateSpace:
    """dt is a part of a wider projection, as in transformers' layers."""
    x = torch.randn(1, TOKENS, HEADS, DIM)
    dt = torch.randn(1, TOKENS, WIDTH)[..., -HEADS:]
    b, c = torch.randn(2, 1, TOKENS, GROUPS, STATE)

    def kernel(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **_: Any) -> Tensor:
        seen.append((x, dt, b, c))
        return x

    options = {"chunk_size": chunk}
    return StateSpace(kernel, (x, dt, b, c), torch.ones(HEADS), options, lambda: is_kernel)


def test_a_part_of_a_wide_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, ...]] = []
    of_layer = scan(seen)
    of_layer.run(EVERY, None, ends=False)
    monkeypatch.setattr(state_space, "MOST_PLACES", TOKENS * HEADS * DIM)
    of_layer.run(EVERY, None, ends=False)
    (before, after) = seen
    assert [x.stride(1) for x in before] == [HEADS * DIM, WIDTH, GROUPS * STATE, GROUPS * STATE]
    assert [x.stride(1) for x in after] == [HEADS * DIM, HEADS, GROUPS * STATE, GROUPS * STATE]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("chunk", "numbers"),
    [
        (8, TOKENS * HEADS * DIM),  # x
        (2, TOKENS // 2 * HEADS * DIM * STATE),  # states
        (32, GROUPS * TOKENS**2),  # products of C and B
    ],
)
def test_what_a_scan_can_t_count_is_refused(
    chunk: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, ...]] = []
    of_layer = scan(seen, chunk)
    monkeypatch.setattr(state_space, "MOST_PLACES", numbers)
    of_layer.run(EVERY, None, ends=False)
    monkeypatch.setattr(state_space, "MOST_PLACES", numbers - 1)
    with pytest.raises(ValueError, match=f"32 tokens .* are {numbers:,} numbers .* more GPUs"):
        of_layer.run(EVERY, None, ends=False)
    assert of_layer.run_documents([0, 16, 32]) is None  # each by itself, then
    if chunk < TOKENS:
        of_layer.run(Interval(0, 16), None, ends=False)
        seen.pop()
    scan(seen, chunk, is_kernel=False).run(EVERY, None, ends=False)
    assert len(seen) == 2
