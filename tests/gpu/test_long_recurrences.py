"""Recurrent layers' kernels over so many tokens that a tensor has more numbers than 32 bits count.

Recurrences are compared with the same kernels over two halves, which have fewer numbers: the second
half gets the state of the first.
"""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from longctx_patch.engine.chain.convolution import in_pieces
from longctx_patch.engine.chain.delta_rule import CHUNK, DeltaRule
from longctx_patch.engine.chain.extents import MOST_PLACES, MOST_UNSIGNED_PLACES
from longctx_patch.engine.chain.recurrence import Recurrence
from longctx_patch.engine.chain.state_space import StateSpace
from longctx_patch.hf.model.sequence_kernels import KERNELS, runs_kernel
from longctx_patch.sequence.layout import Interval
from tests.reference import relative_error

pytestmark = pytest.mark.gpu

HEADS, VALUE_DIM, PIECES = 32, 128, 16
BOUND = 2 * 2**-8
"""Twice bfloat16's rounding."""


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def randoms(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.empty(shape, dtype=dtype, device="cuda")
    for part in made.split(2**13, dim=1):
        part.normal_(generator=generator)
    return made


def require_kernel(function: Callable[..., object]) -> None:
    if not runs_kernel(function):
        pytest.skip(f"needs {KERNELS[function.__name__].distribution}")


def results(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """[the output, the gradients of all inputs]."""
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def of_whole(recurrence: Recurrence, tokens: int) -> Tensor:
    return recurrence.run(Interval(0, tokens), None, ends=False)[0]


def of_halves(recurrence: Recurrence, tokens: int) -> Tensor:
    begun, state = recurrence.run(Interval(0, tokens // 2), None, ends=True)
    ended, _ = recurrence.run(Interval(tokens // 2, tokens), state, ends=False)
    return torch.cat([begun, ended], dim=1)


def assert_alike(found: list[Tensor], wanted: list[Tensor]) -> None:
    """In every piece of the tokens, since what is wrong may be a small part of all."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        pieces = zip(one.chunk(PIECES, dim=1), other.chunk(PIECES, dim=1), strict=True)
        errors = [relative_error(piece, right) for piece, right in pieces]
        assert max(errors) <= BOUND, (number, errors)


@pytest.mark.parametrize(
    ("tokens", "key_dim"), [(33 * 2**13, 128), (65 * 2**13, 64)], ids=["states", "values"]
)
def test_delta_rule(tokens: int, key_dim: int) -> None:
    require_kernel(torch_chunk_gated_delta_rule)
    states = tokens // CHUNK * HEADS * key_dim * VALUE_DIM
    assert states // 2 < MOST_PLACES < max(states, tokens * HEADS * VALUE_DIM)
    keyed = (1, tokens, HEADS, key_dim)
    decays = -F.softplus(randoms(1, tokens, HEADS, seed=3, dtype=torch.float32))
    beta = randoms(1, tokens, HEADS, seed=4).sigmoid()
    value, dout = (randoms(1, tokens, HEADS, VALUE_DIM, seed=seed) for seed in (2, 5))
    inputs = [randoms(*keyed, seed=0), randoms(*keyed, seed=1), value, decays, beta]
    inputs = [each.requires_grad_() for each in inputs]
    options = {"use_qk_l2norm_in_kernel": True}
    rule = DeltaRule(torch_chunk_gated_delta_rule, tuple(inputs), options)
    found = results(of_whole(rule, tokens), inputs, dout)
    wanted = results(of_halves(rule, tokens), inputs, dout)
    assert_alike(found, wanted)


def test_state_space_with_time_steps_that_are_a_part_of_a_projection() -> None:
    """Sizes of Nemotron-H 8B, whose projection has more numbers than 32 bits count."""
    require_kernel(mamba2_chunk_scan)
    tokens, heads, dim, groups, state_dim, width = 15 * 2**13, 128, 64, 8, 128, 18560
    assert (tokens - 1) * width > MOST_PLACES
    x, dout = (randoms(1, tokens, heads, dim, seed=seed) for seed in (0, 4))
    b, c = (randoms(1, tokens, groups, state_dim, seed=seed) for seed in (1, 2))
    projected = randoms(1, tokens, width, seed=3)
    decay = -torch.ones(heads, device="cuda")

    def run(dt: Tensor, shared: Callable[[Recurrence, int], Tensor]) -> list[Tensor]:
        inputs = [each.detach().requires_grad_() for each in (x, dt, b, c)]
        options = {"chunk_size": 128, "dt_softplus": True}
        scan = StateSpace(mamba2_chunk_scan, tuple(inputs), decay, options, lambda: True)
        return results(shared(scan, tokens), inputs, dout)

    found = run(projected[..., -heads:], of_whole)
    wanted = run(projected[..., -heads:].clone(), of_halves)
    assert_alike(found, wanted)


def test_convolution() -> None:
    """As wide as Qwen3.5-9B's, in pieces, looked at where its kernel would begin to count anew."""
    require_kernel(causal_conv1d_fn)
    tokens, channels, reach, near = 33 * 2**14, 8192, 3, 2048
    first_lost = (MOST_UNSIGNED_PLACES + 1) // channels
    assert near < first_lost < tokens - near
    hidden = randoms(1, tokens, channels, seed=0).transpose(1, 2).requires_grad_()
    dout = randoms(1, tokens, channels, seed=1).transpose(1, 2)
    weight = randoms(channels, reach + 1, seed=2)

    def convolve(hidden_BCL: Tensor, before_BCR: Tensor | None) -> Tensor:
        found: Tensor = causal_conv1d_fn(
            hidden_BCL, weight, activation="silu", initial_states=before_BCR
        )
        return found

    out = in_pieces(convolve, reach)(hidden, None)
    (dhidden,) = torch.autograd.grad(out, hidden, dout)
    for start in (0, first_lost - near // 2, tokens - near):
        end = min(start + near + reach, tokens)  # gradients come from the next tokens too
        leaf = hidden[:, :, max(start - reach, 0) : end].detach().float().requires_grad_()
        padded = F.pad(leaf, (max(reach - start, 0), 0))
        right = F.silu(F.conv1d(padded, weight[:, None].float(), groups=channels))
        (grad,) = torch.autograd.grad(right, leaf, dout[:, :, start:end].float())
        own = grad[:, :, start - end :][:, :, :near]
        looked_at = slice(start, start + near)
        assert relative_error(out[:, :, looked_at], right[:, :, :near]) <= BOUND, start
        assert relative_error(dhidden[:, :, looked_at], own) <= BOUND, start
