"""A convolution's kernel is given the tokens before a shard, where it takes them, as a state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig
from longctx_patch.engine.chain.convolution import in_a_row
from longctx_patch.hf.model.transformers_api import recurrent_modules
from tests.hf.by_documents import stock_step
from tests.hf.call.test_mixers import CHAINED, LENGTH, Function, assert_exact, install_kernels
from tests.hf.float64 import in_float64

FAMILIES = [name for name in ("qwen3_5_text", "falcon_h1", "nemotron_h") if name in CHAINED]


def kernel_over(stock: Function, calls: list[bool]) -> Function:
    """As causal-conv1d's, which takes a state of tokens whose channels lie side by side alone. It
    notes whether each call had one."""

    def kernel(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        calls.append(initial_states is not None)
        if initial_states is None:
            return stock(x, weight, bias, activation=activation)
        reach = weight.shape[1] - 1
        assert initial_states.shape == (*x.shape[:2], reach)
        assert x.stride(1) == initial_states.stride(1) == 1
        assert x.shape[2] > reach
        joined = torch.cat([initial_states, x], dim=2)
        return stock(joined, weight, bias, activation=activation)[:, :, reach:]

    return kernel


def calls_of(
    family: str, config: LongContextConfig, lengths: tuple[int, ...], patched: pytest.MonkeyPatch
) -> list[bool]:
    """Of all layers and ranks of an exact step."""
    model, calls = in_float64(family), list[bool]()
    wanted = stock_step(copy.deepcopy(model), lengths)

    def made(name: str, stock: Function) -> Function | None:
        return kernel_over(stock, calls) if name == "causal_conv1d_fn" else None

    install_kernels(model, made, patched)
    assert_exact(model, config, lengths, wanted)
    assert len(calls) == len(recurrent_modules(model)) * config.ring_degree
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_contiguous_shards_hand_over_a_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongContextConfig(ring_degree=3, layout="contiguous")
    calls = calls_of(family, config, (LENGTH,), monkeypatch)
    assert sum(calls) == len(calls) * 2 // 3  # all ranks but the first


def test_a_shard_of_few_tokens_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a kernel would need the state and the tokens together."""
    config = LongContextConfig(ring_degree=3, layout="contiguous")
    assert not any(calls_of(FAMILIES[0], config, (8,), monkeypatch))


def test_several_segments_are_convolved_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongContextConfig(ring_degree=3, layout="zigzag")
    calls = calls_of(FAMILIES[0], config, (LENGTH,), monkeypatch)
    assert sum(calls) == len(calls) // 3  # the two segments of the last rank are one


def test_channels_lie_side_by_side() -> None:
    made = torch.randn(2, 5, 3).transpose(1, 2)
    assert in_a_row([made]).data_ptr() == made.data_ptr()
    joined = in_a_row([made, torch.randn(2, 3, 4)])
    assert joined.shape == (2, 3, 9)
    assert joined.stride(1) == 1
