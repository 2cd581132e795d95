"""An MLP's tiles run again without their last product, to the same bits."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import LlamaForCausalLM

from longctx_patch.hf.layers.mlp_tiles import TiledForward
from longctx_patch.hf.model.checks import FAMILIES
from longctx_patch.hf.model.transformers_api import dense_mlps
from longctx_patch.memory.last_product import is_plain, left_out
from longctx_patch.memory.tiled_mlp import run_tiled
from tests.hf.tiny import featured_model, gradients, tiny_model

SIZE, INTERMEDIATE, ROWS, LENGTH, TILES = 16, 48, 2, 31, 4
EXPERTS_ONLY = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
PRODUCT = 2 * ROWS * LENGTH * INTERMEDIATE * SIZE


class Mlp(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(SIZE, INTERMEDIATE)
        self.up = nn.Linear(SIZE, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, SIZE, bias=bias)

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))


class Doubled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x)).mul_(2)


class Shifted(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x)) + x


class Twice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.down(self.inner(x))))


class ShiftedInOneTile(Mlp):
    """In that with the first token."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.inner(x))
        return out + 1 if (x == 7.0).any() else out


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


def step(mlp: Mlp, last: nn.Linear | None, autocast: bool = False) -> tuple[dict[str, Tensor], int]:
    """Output and gradients of a pass in tiles, and the FLOPs of all its products."""
    mlp.zero_grad()
    hidden = torch.randn(ROWS, LENGTH, SIZE, generator=torch.Generator().manual_seed(1))
    hidden[:, 0] = 7.0
    hidden.requires_grad_()
    with Flops() as flops:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = run_tiled(mlp.forward, mlp, hidden, TILES, last)
        out.float().sin().sum().backward()
    assert hidden.grad is not None
    return {"out": out.detach(), "hidden": hidden.grad, **gradients(mlp)}, flops.total


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [(), ("down.weight", "down.bias"), ("gate.weight",)])
def test_one_product_less_and_the_same_bits(
    bias: bool, frozen: tuple[str, ...], autocast: bool
) -> None:
    mlp = Mlp(bias)
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name not in frozen)
    wanted, all_flops = step(mlp, None, autocast)
    found, flops = step(mlp, mlp.down, autocast)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    assert all_flops - flops == PRODUCT
    assert "forward" not in vars(mlp.down)


@pytest.mark.parametrize("kind", [Shifted, Twice, ShiftedInOneTile])
def test_what_is_not_the_result_of_every_tile_is_computed(kind: type[Mlp]) -> None:
    mlp = kind()
    wanted, all_flops = step(mlp, None)
    found, flops = step(mlp, mlp.down)
    assert flops == all_flops
    assert all(map(torch.equal, found.values(), wanted.values()))


def test_a_result_that_is_written_to_is_an_error() -> None:
    """Which code that is known does not do."""
    mlp = Doubled()
    with pytest.raises(RuntimeError, match="modified inplace"):
        step(mlp, mlp.down)
    assert "forward" not in vars(mlp.down)


def test_without_gradients_nothing_is_looked_at() -> None:
    mlp = Mlp()
    hidden = torch.randn(ROWS, LENGTH, SIZE)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(
                run_tiled(mlp.forward, mlp, hidden, TILES, mlp.down), mlp(hidden)
            )


def test_who_comes_between_forward_and_backward_is_heard() -> None:
    mlp, seen = Mlp(), []
    hidden = torch.randn(ROWS, LENGTH, SIZE, requires_grad=True)
    out = run_tiled(mlp.forward, mlp, hidden, TILES, mlp.down)
    mlp.down.register_forward_hook(lambda *args: seen.append(bool(args[-1].any())))
    out.sum().backward()
    assert seen == [True] * TILES

    def own(x: Tensor) -> Tensor:
        return nn.Linear.forward(mlp.down, x)

    mlp = Mlp()
    out = run_tiled(mlp.forward, mlp, hidden, TILES, mlp.down)
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
    mlp = Mlp()
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    assert not is_plain(mlp.down)
    monkeypatch.undo()
    monkeypatch.setattr(nn.functional, "linear", lambda *args: torch.zeros(1))
    assert not is_plain(mlp.down)
    monkeypatch.undo()
    assert is_plain(mlp.down)


def hooked(add: str) -> nn.Linear:
    linear = nn.Linear(4, 4)
    getattr(linear, add)(lambda *_: None)
    return linear


def test_only_a_linear_layer_that_nobody_watches_is_plain() -> None:
    class Own(nn.Linear):
        pass

    class OwnTensor(Tensor):
        pass

    assert is_plain(nn.Linear(4, 4))
    assert not is_plain(None)
    assert not is_plain(Own(4, 4))
    assert not is_plain(parametrizations.weight_norm(nn.Linear(4, 4)))
    for add in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        assert not is_plain(hooked(f"register_{add}")), add
    other = nn.Linear(4, 4)
    other.weight = nn.Parameter(torch.ones(4, 4).as_subclass(OwnTensor))
    assert not is_plain(other)
    kept = nn.Linear(4, 4)
    del kept.weight
    kept.register_buffer("weight", torch.ones(4, 4).as_subclass(OwnTensor))
    assert not is_plain(kept)
    compiled = nn.Linear(4, 4)
    compiled.compile()
    assert not is_plain(compiled)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_plain(nn.Linear(4, 4))
    hook.remove()
    assert is_plain(nn.Linear(4, 4))


def tiled(mlp: Any, below: Any = None) -> TiledForward:
    return TiledForward(mlp, below, TILES, mlp.gate_proj.out_features, lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlps_of_every_family_leave_out_their_down_projection(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But of StarCoder2, which names it otherwise and may drop out some of what it gives."""
    model = featured_model(family)
    mlps: list[Any] = [mlp for mlp in dense_mlps(model) if mlp is not None]
    assert bool(mlps) == (family not in EXPERTS_ONLY)
    for mlp in mlps:
        found = []
        for leaves_out in (False, True):
            mlp.zero_grad()
            torch.manual_seed(1)
            hidden = torch.randn(ROWS, LENGTH, model.config.hidden_size, requires_grad=True)
            forward = TiledForward(mlp, None, TILES, model.config.intermediate_size, lambda _: None)
            with monkeypatch.context() as patched, Flops() as flops:
                if not leaves_out:
                    patched.setattr(TiledForward, "_last_layer", lambda _: None)
                forward(hidden).sin().sum().backward()
            assert hidden.grad is not None
            found.append(({"hidden": hidden.grad, **gradients(mlp)}, flops.total))
        (wanted, all_flops), (mine, fewer) = found
        assert mine.keys() == wanted.keys()
        assert all(map(torch.equal, mine.values(), wanted.values()))
        left_out = 0 if family == "starcoder2" else mlp.down_proj.weight.numel()
        assert all_flops - fewer == 2 * ROWS * LENGTH * left_out


def test_code_is_known_by_where_it_was_written() -> None:
    """A wrapper takes over all names of what it wraps."""
    mlp: Any = tiny_model().get_decoder().layers[0].mlp

    @functools.wraps(mlp.forward)
    def wrapper(x: Tensor) -> Tensor:
        return mlp.down_proj(x)

    assert wrapper.__module__.startswith("transformers.models.")
    assert tiled(mlp, below=wrapper)._last_layer() is None
    assert tiled(mlp, below=functools.partial(type(mlp).forward, mlp))._last_layer() is None
    assert tiled(mlp, below=mlp.forward)._last_layer() is mlp.down_proj
    # As Liger Kernel gives an MLP its method.
    home: dict[str, Any] = {"__name__": "liger_kernel.transformers.swiglu"}
    exec("def forward(self, x): return self.down_proj(x)", home)
    assert tiled(mlp, below=home["forward"].__get__(mlp))._last_layer() is mlp.down_proj


def test_of_other_code_nothing_is_left_out() -> None:
    class OwnMlp(type(tiny_model().get_decoder().layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = tiny_model()
    assert isinstance(model, LlamaForCausalLM)
    mlp: Any = model.get_decoder().layers[0].mlp
    assert tiled(mlp)._last_layer() is mlp.down_proj
    assert tiled(mlp, below=lambda x: mlp.down_proj(x))._last_layer() is None
    assert tiled(OwnMlp(model.config))._last_layer() is None
    mlp.down_proj.register_forward_hook(lambda *_: None)
    assert tiled(mlp)._last_layer() is None
