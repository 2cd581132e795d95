"""What `products` frees comes back to the bit, in layers of every shape."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longctx_patch.memory.products import free_inputs_of_products
from tests.hf.tiny import featured_model
from tests.memory.trained import Gradients, Trained, assert_equal

# Layers that share keys and values, that return a tuple, with experts, with gelu, with one product.
FAMILIES = ("gemma4_text", "bamba", "qwen3_moe", "gemma2", "phi3")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without_it(family: str) -> None:
    found: dict[str, Gradients] = {}
    for policy in ("none", "products"):
        torch.manual_seed(0)
        recurs: dict[str, Any] = {"torch_recurrence": True} if family == "bamba" else {}
        it = Trained(featured_model(family).bfloat16(), checkpoint=policy, length=24, **recurs)
        found[policy] = it.step()
    assert_equal(found["products"], found["none"])


class Gated(nn.Module):
    """An MLP around one activation."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sides = nn.Linear(8, 32)
        self.down = nn.Linear(16, 8)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.sides(hidden).chunk(2, -1)
        result: Tensor = hidden + self.down(self.activation(gate) * up)
        return result


@pytest.mark.parametrize(
    ("activation", "freed"),
    [(nn.SiLU(), 2), (nn.GELU(), 2), (nn.GELU("tanh"), 2), (nn.Tanh(), 1), (nn.Identity(), 1)],
)
def test_results_of_known_functions_are_freed(activation: nn.Module, freed: int) -> None:
    grads: list[list[Tensor]] = []
    for only_count in (True, False):
        mlp = Gated(activation)
        hidden = torch.linspace(-2, 2, 40).view(5, 8).requires_grad_() * 1
        out = mlp(hidden)
        found = free_inputs_of_products(out, hidden, only_count=only_count)
        assert found == freed * 4 * 5 * 16
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([weight.grad for weight in mlp.parameters() if weight.grad is not None])
    assert len(grads[0]) == 4
    assert all(map(torch.equal, *grads))


def test_nothing_is_freed_twice_or_within_others_hooks() -> None:
    mlp, hidden = Gated(nn.SiLU()), torch.ones(5, 8, requires_grad=True) * 1
    first = mlp(hidden)
    assert free_inputs_of_products(first, hidden) > 0
    second = mlp(first)
    assert free_inputs_of_products(second, first) > 0  # it leaves the first layer alone
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert free_inputs_of_products(mlp(hidden), hidden) == 0
    with torch.no_grad():
        assert free_inputs_of_products(mlp(hidden), hidden) == 0
