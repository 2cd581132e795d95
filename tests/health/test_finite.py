"""A bad step changes nothing, whichever optimizer takes it, and a good one is untouched."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longctx_patch.health.finite import BadStepError, FiniteSteps, skips_on_device

OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}
ON_DEVICE = {"fused AdamW", "fused Adam"}


class Reads(TorchDispatchMode):
    """Counts how often the host asks for a number of a tensor, for which it would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def gradients(module: torch.nn.Module, step: int, factor: float = 1.0) -> tuple[Any, Any]:
    """(loss, gradient norm) of a step's own batch."""
    torch.manual_seed(step)
    loss = module(torch.randn(4, 5)).square().mean() * factor
    loss.backward()
    return loss, torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def everything(module: Any, optimizer: Any) -> list[torch.Tensor]:
    """Weights and all states of the optimizer, in order."""
    states = [v for state in optimizer.state.values() for v in state.values() if v is not None]
    return [*module.parameters(), *map(torch.as_tensor, states)]


def equal(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(ours) == len(others) and all(map(torch.equal, ours, others))


@pytest.mark.parametrize("first_is_bad", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_a_bad_step_is_a_run_without_it(name: str, first_is_bad: bool) -> None:
    """To the last bit, momenta and step counts included, also where it is the very first step."""
    bad = 0 if first_is_bad else 2
    guarded, plain = model(), model()
    ours, other = OPTIMIZERS[name](guarded.parameters()), OPTIMIZERS[name](plain.parameters())
    steps = FiniteSteps(ours, skip_bad_steps=1)
    for step in range(5):
        factor = math.nan if step == bad else 1.0
        found = steps.step(*gradients(guarded, step, factor))
        ours.zero_grad()
        assert found.is_applied == (step != bad)
        if step != bad:
            loss, norm = gradients(plain, step)
            other.step()
            other.zero_grad()
            assert (found.loss, found.grad_norm) == (loss.item(), norm.item())
    assert equal(everything(guarded, ours), everything(plain, other))
    assert steps.history.num_skipped == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_reads_no_number_before_a_step_that_can_be_skipped_on_the_device(
    name: str,
) -> None:
    """And then once: what arrived, of which it takes four numbers."""
    module = model()
    optimizer = OPTIMIZERS[name](module.parameters())
    optimizer.add_param_group({"params": []})  # a trainer's of weights without decay
    steps = FiniteSteps(optimizer)
    gradients(module, 0)
    optimizer.step()  # makes its states
    optimizer.zero_grad()
    loss, norm = gradients(module, 1)
    with Reads() as alone:
        optimizer.step()
    with Reads() as reads:
        pending = steps.guard(loss, norm)
        optimizer.step()
    assert skips_on_device(optimizer, loss.device) == (name in ON_DEVICE)
    assert (reads.count <= alone.count) == (name in ON_DEVICE)
    assert steps.settle(pending).is_applied
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_was_wrong_is_said_and_ends_the_run(what: str, value: float) -> None:
    module = model()
    optimizer = OPTIMIZERS["fused AdamW"](module.parameters())
    before = copy.deepcopy(list(module.parameters()))
    loss, norm = gradients(module, 0)
    if what == "loss":
        loss = loss * value
    else:
        norm = norm * value
    said = f"loss is {value} on rank 0" if what == "loss" else f"gradient norm is {value}"
    with pytest.raises(BadStepError, match=rf"{said}; row 7\. skip_bad_steps=0, so the run ends"):
        FiniteSteps(optimizer).step(loss, norm, lambda: "row 7")
    assert equal(list(module.parameters()), before)


def test_no_more_steps_are_skipped_than_allowed_over_a_run_and_its_resumption() -> None:
    module = model()
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    steps = FiniteSteps(optimizer, skip_bad_steps=2)
    steps.step(*gradients(module, 0, math.nan))
    resumed = FiniteSteps(optimizer, skip_bad_steps=2, history=steps.history)
    resumed.step(*gradients(module, 1, math.nan))
    with pytest.raises(BadStepError, match=r"2 steps were skipped before it, and skip_bad_steps=2"):
        resumed.step(*gradients(module, 2, math.nan))


def test_a_gradient_scaler_skips_overflows_by_itself() -> None:
    """So an infinite norm is no bad step under it; a loss that is NaN is."""

    class Scaled:
        scaler = object()

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    module = model()
    scaled = Scaled(OPTIMIZERS["fused AdamW"](module.parameters()))
    steps = FiniteSteps(scaled)
    loss, norm = gradients(module, 0)
    assert steps.settle(steps.guard(loss, norm * math.inf)).is_applied
    assert not hasattr(scaled.optimizer, "found_inf")  # which the scaler sets
    pending = steps.guard(loss * math.nan, norm)
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(BadStepError, match="loss is nan"):
        steps.settle(pending)


def test_settings_that_cannot_be_right_are_refused() -> None:
    optimizer = OPTIMIZERS["AdamW"](model().parameters())
    with pytest.raises(ValueError, match="skip_bad_steps=-1: a number of steps, 0 or more"):
        FiniteSteps(optimizer, skip_bad_steps=-1)
