"""The place where a step's numbers stop being finite is named, and looking changes nothing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longctx_patch.health.where import Pass, source_of
from longctx_patch.memory.random_state import RandomState
from tests.hf.tiny import tiny_model, token_rows

ROWS = ["row 4", "row 9"]


class NanBackward(torch.autograd.Function):
    """Gives its input, and a gradient with one NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        broken = gradients[0].clone()
        broken.view(-1)[3] = math.nan
        return broken


def passes(model: nn.Module) -> list[Pass]:
    """Two micro batches of a row each."""

    def run(ids: Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    rows = [torch.tensor([row["input_ids"]]) for row in token_rows(11, 2)]
    return [Pass(partial(run, ids), said) for ids, said in zip(rows, ROWS, strict=True)]


def nothing(model: Any) -> None:
    """Leaves the model as it is."""


def break_output(model: Any) -> None:
    def infinite(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output / 0

    model.model.layers[1].mlp.up_proj.register_forward_hook(infinite)


def break_loss(model: Any) -> None:
    def lose(module: nn.Module, inputs: Any, output: Any) -> Any:
        output.loss = output.loss * math.nan
        return output

    model.register_forward_hook(lose)


def break_backward(model: Any) -> None:
    def flawed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return NanBackward.apply(output)

    model.model.layers[0].mlp.down_proj.register_forward_hook(flawed)


def break_gradient(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight.register_hook(lambda g: g * math.nan)


def break_weight(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] = math.nan


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        (
            break_output,
            "the first layer with an output that is not finite is model.layers.1.mlp.up_proj (",
        ),
        (break_loss, "the loss is nan, and every layer before it is finite"),
        (
            break_backward,
            "that is not finite (96 of 1,056 values); in backward that of "
            "model.layers.0.mlp's output, just before, is finite",
        ),
        (break_gradient, "the gradient of weight model.layers.1.self_attn.q_proj.weight is not"),
        (break_weight, "weight model.layers.0.self_attn.k_proj.weight has 1 values that are not"),
        (nothing, "run again, the step's layers, loss and gradients are finite"),
    ],
)
def test_the_first_place_is_named(flaw: Callable[[Any], None], said: str) -> None:
    model = tiny_model()
    flaw(model)
    found = source_of(model, passes(model), RandomState.now(torch.device("cpu")))
    assert said in found
    assert ("its rows: row 4" in found) == (flaw not in (nothing, break_weight))
    assert ("first on rank 0" in found) == (flaw is not nothing)


def test_the_micro_batch_is_found_under_the_same_dropout_and_nothing_is_left_changed() -> None:
    """The flaw is in the second micro batch alone, where a certain random number is drawn."""
    model: Any = tiny_model()
    random = RandomState.now(torch.device("cpu"))
    first, second = torch.rand(1), torch.rand(1)
    drawn: list[Tensor] = []

    def flawed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        drawn.append(torch.rand(1))
        return output * math.nan if torch.equal(drawn[-1], second) else output

    model.model.layers[0].mlp.register_forward_hook(flawed)
    weight = model.lm_head.weight
    weight.grad = torch.ones_like(weight)
    state = torch.get_rng_state()
    found = source_of(model, passes(model), random)
    assert torch.equal(torch.cat(drawn), torch.cat([first, second]))
    assert "model.layers.0.mlp (" in found
    assert found.endswith("its rows: row 9")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in model.parameters() if p is not weight)
    assert [len(m._forward_hooks) for m in model.modules() if m._forward_hooks] == [1]
