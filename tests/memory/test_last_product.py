"""An MLP's tiles run again without their last product, to the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from longctx_patch.memory import run_tiled, tiled_mlp
from longctx_patch.memory.last_product import can_be_watched, run_and_look
from tests.hf.tiny import gradients, tiny_model

SIZE, INTERMEDIATE, ROWS, LENGTH = 16, 48, 2, 31


class Mlp(nn.Module):
    """What comes after the last product is `then`."""

    def __init__(self, then: Callable[[Tensor], Tensor] = lambda x: x, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(SIZE, INTERMEDIATE)
        self.up = nn.Linear(SIZE, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, SIZE, bias=bias)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


class Flops(TorchDispatchMode):
    """Of all matrix products while it is entered."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def made_input() -> Tensor:
    return torch.randn(ROWS, LENGTH, SIZE, generator=torch.Generator().manual_seed(1))


def step(mlp: Mlp, num_tiles: int = 4, autocast: bool = False) -> tuple[dict[str, Tensor], int]:
    """Output and gradients of a pass in tiles, and the FLOPs of all its products."""
    mlp.zero_grad()
    hidden = made_input().requires_grad_()
    with Flops() as flops:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = run_tiled(mlp.forward, mlp, hidden, num_tiles)
        out.float().sin().sum().backward()
    assert hidden.grad is not None
    found = {"out": out.detach(), "hidden": hidden.grad, **gradients(mlp)}
    return found, flops.total


def without_looking(
    monkeypatch: pytest.MonkeyPatch, mlp: Mlp, autocast: bool = False
) -> tuple[dict[str, Tensor], int]:
    with monkeypatch.context() as patched:
        patched.setattr(tiled_mlp, "can_be_watched", lambda _: False)
        return step(mlp, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [(), ("down.weight", "down.bias"), ("gate.weight",)])
def test_one_product_less_and_the_same_bits(
    bias: bool, frozen: tuple[str, ...], autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = Mlp(bias=bias)
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name not in frozen)
    wanted, all_flops = without_looking(monkeypatch, mlp, autocast)
    found, flops = step(mlp, autocast=autocast)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    assert all_flops - flops == 2 * ROWS * LENGTH * INTERMEDIATE * SIZE


@pytest.mark.parametrize(
    "then",
    [
        lambda out: out * 2,
        lambda out: out.mul_(2),
        lambda out: out + torch.nn.functional.linear(out, torch.eye(SIZE)),
        lambda out: nn.functional.dropout(out, 0.5),
    ],
)
def test_what_is_not_the_last_is_computed(
    then: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = Mlp(then)
    torch.manual_seed(3)
    wanted, all_flops = without_looking(monkeypatch, mlp)
    torch.manual_seed(3)
    found, flops = step(mlp)
    assert flops == all_flops
    assert all(map(torch.equal, found.values(), wanted.values()))
    assert run_and_look(mlp, made_input())[1] is None


def test_a_layer_that_is_used_twice_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place in the run."""

    class Twice(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            inner = nn.functional.silu(self.gate(x)) * self.up(x)
            return self.down(inner * self.gate(self.down(inner)))

    mlp = Twice()
    wanted, all_flops = without_looking(monkeypatch, mlp)
    found, flops = step(mlp)
    assert all_flops - flops == 2 * ROWS * LENGTH * INTERMEDIATE * SIZE
    assert all(map(torch.equal, found.values(), wanted.values()))
    assert run_and_look(mlp, made_input())[1] == 4


def test_nothing_is_left_out_under_hooks_or_of_compiled_modules() -> None:
    mlp = Mlp()
    assert can_be_watched(mlp)
    mlp.register_forward_hook(lambda *_: None)  # of the module itself, which tiles don't run
    assert can_be_watched(mlp)
    seen: list[Tensor] = []
    hook = mlp.down.register_forward_hook(lambda *args: seen.append(args[-1].detach().clone()))
    assert not can_be_watched(mlp)
    step(mlp)
    assert len(seen) == 2 * 4
    assert all(map(torch.equal, seen[:4], seen[4:]))
    hook.remove()
    assert can_be_watched(mlp)
    mlp.up.compile()
    assert not can_be_watched(mlp)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_mlps_of_models_end_with_it(family: str) -> None:
    mlp = tiny_model(family).get_decoder().layers[0].mlp
    hidden = torch.randn(1, 3, mlp.hidden_size)
    out, number = run_and_look(mlp.forward, hidden)
    assert torch.equal(out, mlp(hidden))
    assert number == 2
