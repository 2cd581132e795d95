"""An MLP's tiles run again without their last product, to the same bits."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from longctx_patch.hf.layers.mlp_tiles import TiledForward
from longctx_patch.memory.last_product import is_plain, left_out
from longctx_patch.memory.tiled_mlp import run_tiled
from tests.hf.tiny import gradients, tiny_model
from tests.memory.test_tiled_mlp import INTERMEDIATE, SIZE, Mlp
from tests.memory.trained import Flops, Gradients, assert_equal

ROWS, LENGTH, TILES = 2, 31, 4
PRODUCT = 2 * ROWS * LENGTH * INTERMEDIATE * SIZE


class Ending(Mlp):
    """An MLP with dropout whose forward is `ends`; by default, it is the whole MLP's."""

    def __init__(self, ends: Callable[[Any, Tensor], Tensor] = Mlp.forward) -> None:
        torch.manual_seed(0)
        super().__init__(dropout=0.3)
        self.ends, self.whole = ends, super().forward

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(self, x)


def shifted_in_one_tile(mlp: Ending, x: Tensor) -> Tensor:
    """Shift only the tile with the last token; other tiles have had their backward by then."""
    return mlp.whole(x) + 1 if (x == 7.0).any() else mlp.whole(x)


def step(mlp: Mlp, last: nn.Linear | None, autocast: bool = False) -> tuple[Gradients, int]:
    """Output and gradients of a pass in tiles, and the FLOPs of all its products."""
    mlp.zero_grad()
    torch.manual_seed(2)
    hidden = torch.randn(ROWS, LENGTH, SIZE)
    hidden[:, -1] = 7.0
    hidden.requires_grad_()
    with Flops() as flops:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = run_tiled(mlp.forward, mlp, hidden, TILES, last)
        out.float().sin().sum().backward()
    assert hidden.grad is not None
    found = {"out": out.detach(), "hidden": hidden.grad, **gradients(mlp)}
    return found | {"drawn next": torch.rand(3)}, flops.total


@pytest.mark.parametrize("frozen", [(), ("down.weight", "down.bias"), ("gate.weight",)])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_product_less_and_the_same_bits(frozen: tuple[str, ...], autocast: bool) -> None:
    mlp = Ending()
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name not in frozen)
    wanted, all_flops = step(mlp, None, autocast)
    found, flops = step(mlp, mlp.down, autocast)
    assert_equal(found, wanted)
    assert all_flops - flops == PRODUCT
    assert "forward" not in vars(mlp.down)


@pytest.mark.parametrize(
    "ends",
    [
        lambda mlp, x: mlp.whole(x) + x,
        lambda mlp, x: mlp.whole(mlp.whole(x)),
        shifted_in_one_tile,
    ],
)
def test_where_a_tile_is_not_the_layers_result_nothing_is_left_out(ends: Any) -> None:
    """Every product is computed again then, and dropout draws what it drew in forward."""
    mlp = Ending(ends)
    assert_equal(step(mlp, mlp.down)[0], step(mlp, None)[0])
    assert "forward" not in vars(mlp.down)


def test_a_result_that_is_written_to_is_an_error() -> None:
    """An MLP that writes into the down projection's result raises; no known MLP does this."""
    mlp = Ending(lambda mlp, x: mlp.whole(x).mul_(2))
    with pytest.raises(RuntimeError, match="modified inplace"):
        step(mlp, mlp.down)
    assert "forward" not in vars(mlp.down)


def test_who_comes_between_forward_and_backward_is_heard() -> None:
    mlp, seen = Ending(), []
    hidden = torch.randn(ROWS, LENGTH, SIZE, requires_grad=True)
    out = run_tiled(mlp.forward, mlp, hidden, TILES, mlp.down)
    mlp.down.register_forward_hook(lambda *args: seen.append(bool(args[-1].any())))
    out.sum().backward()
    assert seen == [True] * TILES

    mlp = Ending()
    out = run_tiled(mlp.forward, mlp, hidden, TILES, mlp.down)
    own = functools.partial(nn.Linear.forward, mlp.down)
    mlp.down.forward = own  # type: ignore[method-assign]
    out.sum().backward()
    assert mlp.down.forward is own


def test_other_threads_get_what_the_layer_gives() -> None:
    linear, hidden = nn.Linear(4, 4), torch.randn(3, 4)
    wanted = linear(hidden)
    with left_out(linear), ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(linear, hidden).result(), wanted)
        assert not linear(hidden).any()
    assert torch.equal(linear(hidden), wanted)


def test_another_linear_in_torchs_place_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(4, 4)
    for holder, name in ((nn.Linear, "forward"), (nn.functional, "linear")):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, lambda *args: torch.zeros(1))
            assert not is_plain(linear)
    assert is_plain(linear)


class OwnTensor(Tensor):
    pass


def layers_that_are_not_plain() -> Iterator[object]:
    yield None
    yield type("Own", (nn.Linear,), {})(4, 4)
    yield parametrizations.weight_norm(nn.Linear(4, 4))
    for hook in (
        "forward_hook",
        "forward_pre_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
    ):
        linear = nn.Linear(4, 4)
        getattr(linear, f"register_{hook}")(lambda *_: None)
        yield linear
    compiled, of_own_tensor, with_a_buffer = (nn.Linear(4, 4) for _ in range(3))
    compiled.compile()
    yield compiled
    own = torch.ones(4, 4).as_subclass(OwnTensor)
    of_own_tensor.weight = nn.Parameter(own)
    yield of_own_tensor
    del with_a_buffer.weight
    with_a_buffer.register_buffer("weight", own)
    yield with_a_buffer


def test_only_a_linear_layer_that_nobody_watches_is_plain() -> None:
    assert not any(map(is_plain, layers_that_are_not_plain()))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_plain(nn.Linear(4, 4))
    hook.remove()
    assert is_plain(nn.Linear(4, 4))


def tiles(mlp: Any, below: Any = None) -> TiledForward:
    return TiledForward(mlp, below, TILES, INTERMEDIATE, lambda _: None)


def test_code_is_known_by_where_it_was_written() -> None:
    """Wrappers, which copy the names of what they wrap, and subclasses are not known code."""
    mlp: Any = tiny_model().get_decoder().layers[0].mlp

    @functools.wraps(mlp.forward)
    def wrapper(x: Tensor) -> Tensor:
        return mlp.down_proj(x)

    class OwnMlp(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    assert wrapper.__module__.startswith("transformers.models.")
    # Liger Kernel gives an MLP its method like this.
    home: dict[str, Any] = {"__name__": "liger_kernel.transformers.swiglu"}
    exec("def forward(self, x): return self.down_proj(x)", home)
    for below in (None, mlp.forward, home["forward"].__get__(mlp)):
        assert tiles(mlp, below)._last_layer() is mlp.down_proj
    for below in (wrapper, functools.partial(type(mlp).forward, mlp), lambda x: mlp.down_proj(x)):
        assert tiles(mlp, below)._last_layer() is None
    assert tiles(OwnMlp(mlp.config))._last_layer() is None
    mlp.down_proj.register_forward_hook(lambda *_: None)
    assert tiles(mlp)._last_layer() is None
