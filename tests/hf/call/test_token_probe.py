"""A user's own MLP or norm that mixes tokens is found on the first step, on every rank: its loss
was off by 9 % without an error."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    SequenceParallelismError,
    verify_on_virtual_ranks,
)
from tests.hf.float64 import padded_rows
from tests.hf.steps import on_ranks
from tests.hf.tiny import tiny_model

TWO = LongContextConfig(ring_degree=2, checkpoint="full")


class Mixed(nn.Module):
    """An MLP or a norm around which each token gets something of others."""

    def __init__(self, inner: nn.Module, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.mix = inner, mix
        self.calls: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.append(hidden.shape[1])
        return self.inner(self.mix(hidden))


def with_mean(hidden: Tensor) -> Tensor:
    return hidden + hidden.mean(1, keepdim=True)


def with_neighbour(hidden: Tensor) -> Tensor:
    return hidden + torch.nn.functional.pad(hidden, (0, 0, 1, -1))


def by_token(hidden: Tensor) -> Tensor:
    return hidden.tanh()


def noisy(hidden: Tensor) -> Tensor:
    return torch.nn.functional.dropout(hidden, 0.5)


def made(place: str, mix: Callable[[Tensor], Tensor]) -> Any:
    model: Any = tiny_model()
    layer = model.model.layers[1]
    if place == "forward":
        own = type(layer.mlp).forward
        layer.mlp.forward = MethodType(lambda self, hidden: own(self, mix(hidden)), layer.mlp)
    elif place == "norm":
        model.model.norm = Mixed(model.model.norm, mix)
    else:
        layer.mlp = Mixed(layer.mlp, mix)
    return model


@pytest.mark.parametrize("place", ["mlp", "norm", "forward"])
@pytest.mark.parametrize("mix", [with_mean, with_neighbour, noisy])
def test_what_mixes_tokens_is_refused(place: str, mix: Callable[[Tensor], Tensor]) -> None:

    def refuse(model: Any, _: PatchHandle) -> str:
        with pytest.raises(
            SequenceParallelismError, match="gives a token alone something else"
        ) as error:
            model(**padded_rows())
        assert not any(module._forward_pre_hooks for module in model.model.layers[1].mlp.modules())
        return str(error.value)

    name = "norm (" if place == "norm" else "layers.1.mlp ("
    assert all(name in said for said in on_ranks(made(place, mix), TWO, refuse))


@pytest.mark.parametrize("place", ["mlp", "norm", "forward"])
def test_what_computes_each_token_by_itself_is_exact(place: str) -> None:
    found = verify_on_virtual_ranks(made(place, by_token), TWO, padded_rows())
    assert found.ok, str(found)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_token_is_tried_on_the_first_step_alone_and_by_several_ranks(degree: int) -> None:
    config = LongContextConfig(ring_degree=degree, checkpoint="attention")

    def train(model: Any, handle: PatchHandle) -> list[int]:
        calls: list[int] = model.model.layers[1].mlp.calls
        for _ in range(2):
            model(**padded_rows()).loss.backward()
            calls.append(0)
        return calls

    for calls in on_ranks(made("mlp", by_token), config, train):
        first, second = calls[: calls.index(0)], calls[calls.index(0) + 1 : -1]
        assert first == [1] * (degree > 1) + second
        assert len(second) == 2  # in forward and recomputed in backward
