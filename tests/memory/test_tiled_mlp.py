"""An MLP in tiles, alone: the numbers of the whole MLP in less memory."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longctx_patch.memory.tiled_mlp import run_tiled
from tests.hf.tiny import gradients
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import Gradients, assert_near
from tests.reference import relative_error

SIZE, INTERMEDIATE = 16, 48


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, INTERMEDIATE)
        self.up = nn.Linear(SIZE, INTERMEDIATE, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(INTERMEDIATE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Mlp:
    torch.manual_seed(0)
    return Mlp(**options).to(dtype)


def made_input(
    length: int, *, rows: int = 2, dtype: torch.dtype = torch.float32, needs_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient of the MLP's output."""
    torch.manual_seed(1)
    hidden = torch.randn(rows, length, SIZE, dtype=torch.float64)
    grad = torch.randn(rows, length, SIZE, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(needs_grad), grad.to(dtype)


def passed(
    mlp: nn.Module, hidden: Tensor, grad: Tensor, run: Callable[[Tensor], Tensor]
) -> Gradients:
    """Outputs and all gradients of a pass."""
    mlp.zero_grad()
    hidden.grad = None
    out = run(hidden)
    out.backward(grad.to(out.dtype))
    found = {"out": out.detach(), **gradients(mlp)}
    return found if hidden.grad is None else found | {"hidden": hidden.grad}


def in_tiles(mlp: nn.Module, num_tiles: int) -> Callable[[Tensor], Tensor]:
    return lambda hidden: run_tiled(mlp.forward, mlp, hidden, num_tiles)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("length", [1, 7, 31])
def test_outputs_and_gradients_are_those_of_the_whole_mlp(
    length: int, dtype: torch.dtype, bound: float
) -> None:
    mlp = made(dtype)
    hidden, grad = made_input(length, dtype=dtype)
    wanted = passed(mlp, hidden, grad, mlp)
    assert set(wanted) == {"out", "hidden", *dict(mlp.named_parameters())}
    for num_tiles in (2, 3, 7, 40):
        assert_near(passed(mlp, hidden, grad, in_tiles(mlp, num_tiles)), wanted, bound)
    for name, tensor in passed(mlp, hidden, grad, in_tiles(mlp, 1)).items():
        assert torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("trained", [["gate.bias"], ["up.weight", "down.weight"], []])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_only_what_is_trained_gets_gradients(trained: list[str], needs_grad: bool) -> None:
    mlp = made()
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name in trained)
    hidden, grad = made_input(31, needs_grad=needs_grad)
    if not trained and not needs_grad:
        assert not in_tiles(mlp, 3)(hidden).requires_grad
        return
    found = passed(mlp, hidden, grad, in_tiles(mlp, 3))
    assert set(found) == {"out", *trained, *(["hidden"] if needs_grad else [])}
    assert_near(found, passed(mlp, hidden, grad, mlp))


def test_a_parameter_in_two_places_and_one_without_use() -> None:
    mlp = made()
    mlp.up.weight = mlp.gate.weight
    mlp.unused = nn.Parameter(torch.zeros(3))
    hidden, grad = made_input(31)
    wanted = passed(mlp, hidden, grad, mlp)
    assert_near(passed(mlp, hidden, grad, in_tiles(mlp, 4)), wanted)
    assert mlp.unused.grad is None
    assert mlp.up.weight is mlp.gate.weight


def test_each_hook_runs_once_in_a_backward_pass() -> None:
    mlp = made()
    hidden, grad = made_input(31)
    calls: list[str] = []
    for name, parameter in mlp.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(f"of {name}"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    passed(mlp, hidden, grad, in_tiles(mlp, 5))
    names = dict(mlp.named_parameters())
    assert sorted(calls) == sorted([*names, *(f"of {name}" for name in names)])


@pytest.mark.parametrize("when", ["no_grad", "eval without gradients", "training"])
def test_memory_is_that_of_one_tile(when: str) -> None:
    length, mlp = 512, made()
    hidden, grad = made_input(length, rows=1)
    of_parameters = sum(parameter.nbytes for parameter in mlp.parameters())
    peaks = []
    for num_tiles in (1, 4, 32):
        with LiveBytes() as meter, torch.set_grad_enabled(when == "training"):
            out = in_tiles(mlp.train(when == "training"), num_tiles)(hidden)
            kept = meter.allocated()
            if when == "training":
                out.backward(grad)
                mlp.zero_grad()
            else:
                assert not out.requires_grad
            peaks.append(meter.peak())
        if num_tiles > 1:
            assert kept <= 2 * hidden.nbytes + of_parameters  # input and output
    intermediates = 3 * INTERMEDIATE * length * 4
    assert peaks[0] > (intermediates if when == "training" else 2 / 3 * intermediates)
    rest = 3 * hidden.nbytes + 6 * of_parameters
    assert peaks[2] < rest + 4 * intermediates / 32
    assert all(fewer > more for fewer, more in pairwise(peaks))


def test_dropout_is_drawn_again_in_backward() -> None:
    mlp = made(dropout=0.5)
    hidden, grad = made_input(31)

    def in_pieces(hidden: Tensor) -> Tensor:
        """The same tiles without a recompute."""
        cuts = [number * 31 // 4 for number in range(5)]
        return torch.cat([mlp(hidden[:, a:b]) for a, b in pairwise(cuts)], 1)

    def then_drawn(run: Callable[[Tensor], Tensor]) -> tuple[Gradients, Tensor]:
        """A pass, and random numbers drawn before and after its backward."""
        drawn: list[Tensor] = []

        def run_and_draw(hidden: Tensor) -> Tensor:
            out = run(hidden)
            drawn.append(torch.rand(3))
            return out

        torch.manual_seed(7)
        found = passed(mlp, hidden, grad, run_and_draw)
        return found, torch.cat([*drawn, torch.rand(3)])

    (wanted, drawn), (found, then) = (then_drawn(run) for run in (in_pieces, in_tiles(mlp, 4)))
    assert_near(found, wanted)
    assert torch.equal(then, drawn), "backward moved the random numbers of others"


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_backward_runs_under_the_autocast_of_forward(where: str) -> None:
    mlp, dtypes = made(), []
    mlp.gate.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    hidden, grad = made_input(31)
    found: list[dict[str, Any]] = []
    for num_tiles in (1, 4):
        mlp.zero_grad()
        hidden.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = in_tiles(mlp, num_tiles)(hidden)
            assert out.dtype == torch.bfloat16
            if where == "inside":
                out.backward(grad.bfloat16())
        if where == "outside":
            out.backward(grad.bfloat16())
        found.append({"out": out.detach(), "hidden": hidden.grad, **gradients(mlp)})
    assert_near(found[1], found[0], 0.01)
    assert dtypes == [torch.bfloat16] * (1 + 2 * 4)


def test_autocast_does_not_remember_weights_without_gradients() -> None:
    """An MLP that runs whole in the same context gets gradients of all its weights."""
    mlp = made()
    hidden, grad = made_input(31)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_tiles(mlp, 4)(hidden)
        mlp(hidden).backward(grad.bfloat16())
    assert len(gradients(mlp)) == len(list(mlp.parameters()))


@pytest.mark.parametrize("num_tiles", [2, 7, 64])
def test_bfloat16_is_as_accurate_as_the_whole_mlp(num_tiles: int) -> None:
    exact = made(torch.bfloat16).double()
    hidden, grad = made_input(256, dtype=torch.bfloat16)
    wide = hidden.detach().double().requires_grad_()
    wanted = passed(exact, wide, grad.double(), exact)
    mlp = made(torch.bfloat16)
    whole = passed(mlp, hidden, grad, mlp)
    tiled = passed(mlp, hidden, grad, in_tiles(mlp, num_tiles))
    for name, tensor in wanted.items():
        assert tiled[name].dtype == torch.bfloat16
        error, bound = (relative_error(each[name], tensor) for each in (tiled, whole))
        assert error <= 2 * bound, name


def test_what_would_be_lost_is_refused() -> None:
    mlp, scale = made(), nn.Parameter(torch.ones(()))
    hidden, grad = made_input(31)
    with pytest.raises(RuntimeError, match=r"a trained tensor \[\] that is not.*mlp_tiles=1"):
        run_tiled(lambda x: mlp(x * scale), mlp, hidden, 4).backward(grad)
    out = in_tiles(mlp, 4)(hidden)
    with torch.no_grad():
        mlp.up.weight += 1
    with pytest.raises(RuntimeError, match=r"changed in place between.*before optimizer.step"):
        out.backward(grad)
    out = in_tiles(mlp, 4)(hidden)
    out.backward(grad)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(grad)
