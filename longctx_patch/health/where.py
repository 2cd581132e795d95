"""Finds where a step's numbers stopped being finite: a weight, a layer's output, loss, gradient.

The step is run once more under watch, since its weights have not changed. This reads every layer's
output on the host, so it is slow, and for bad steps only.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longctx_patch.health.weights import first_non_finite_weight, own_part
from longctx_patch.memory.random_state import RandomState
from longctx_patch.rules.together import of_all_ranks, own_rank

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


class Stage(IntEnum):
    """Says where in a pass a number went wrong, in the order in which it comes to them."""

    WEIGHT = 1
    FORWARD = 2
    BACKWARD = 3
    GRADIENT = 4


class Pass(NamedTuple):
    """Forward and backward of one micro batch."""

    run: Callable[[], object]
    """Without an optimizer, and without averaging gradients over ranks where that can be left
    out."""
    rows: str = ""
    """Which rows these are, in words."""


class Source(NamedTuple):
    """The first such place on one rank. The earliest of several ranks sorts first."""

    micro_batch: int
    stage: Stage
    order: int
    """How many layers were watched before it in this stage."""
    rank: int
    text: str
    rows: str


@dataclass
class _Watch:
    """Looks at each layer's output and its gradient until one is not finite."""

    forward: tuple[int, str] | None = None
    backward: tuple[int, str] | None = None
    finite: str = ""
    """The last gradient that was."""
    num_outputs: int = 0
    num_gradients: int = 0

    def ran(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Look at what a module returns."""
        self.num_outputs += 1
        for tensor in _floats(output):
            if self.forward is None and not _is_finite(tensor):
                self.forward = (self.num_outputs, _output_of(name, tensor))
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._went_back(name, gradient))

    def _went_back(self, name: str, gradient: Tensor | None) -> None:
        self.num_gradients += 1
        if self.backward is not None or gradient is None:  # of an output that nothing used
            return
        if _is_finite(gradient):
            self.finite = f"; in backward that of {_called(name)}'s output, just before, is finite"
            return
        what = f"the gradient of {_called(name)}'s output is the first that is not finite"
        self.backward = (self.num_gradients, f"{what} ({_values(gradient)}){self.finite}")


def source_of(model: nn.Module, passes: Sequence[Pass], random: RandomState) -> str:
    """In words, where a bad step's numbers stopped being finite first, on which rank, and the rows
    of that rank. Collective over all processes; the same text on each.

    Gradients are held back meanwhile, and draws of random numbers repeated.

    Args:
        model: as it is trained, with the weights of the bad step.
        passes: those of the step, in order.
        random: the state of random numbers before the step.
    """
    rank = own_rank()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weight = first_non_finite_weight(model)
    mine = [] if weight is None else [Source(-1, Stage.WEIGHT, 0, rank, weight, "")]
    with _without_gradients(trained), random.replayed():
        for number, (run, rows) in enumerate(passes):
            with _watching(model) as watch:
                run()  # on every rank, whatever was found before
            if (found := _seen(watch, model)) is not None:
                mine.append(Source(number, *found[:2], rank, found[2], rows))
    everyones = [source for of_rank in of_all_ranks(mine[:1]) for source in of_rank]
    if not everyones:
        return (
            "run again, the step's layers, loss and gradients are finite, so that its rows and "
            "weights alone are not the cause: a device's memory error, or an exchange of gradients"
        )
    first = min(everyones)
    rows = f"; its rows: {first.rows}" if first.rows else ""
    return f"first on rank {first.rank}: {first.text}{rows}"


def _seen(watch: _Watch, model: nn.Module) -> tuple[Stage, int, str] | None:
    if watch.forward is not None:
        return Stage.FORWARD, *watch.forward
    if watch.backward is not None:
        return Stage.BACKWARD, *watch.backward
    for order, (name, parameter) in enumerate(model.named_parameters()):
        gradient = None if parameter.grad is None else own_part(parameter.grad)
        if gradient is not None and not _is_finite(gradient):
            what = f"the gradient of weight {_plain(name)} is not finite"
            return Stage.GRADIENT, order, f"{what} ({_values(gradient)})"
    return None


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    watch = _Watch()
    # Inner modules end before those around them, so the first to be seen is the innermost.
    hooks = [
        module.register_forward_hook(partial(watch.ran, _plain(name)))
        for name, module in model.named_modules()
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _without_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within it the parameters have no gradients; afterwards those that they had before."""
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient


def _output_of(name: str, tensor: Tensor) -> str:
    if not name and tensor.ndim == 0:
        return f"the loss is {tensor.item()}, and every layer before it is finite"
    return (
        f"the first layer with an output that is not finite is {_called(name)} ({_values(tensor)})"
    )


def _called(name: str) -> str:
    return name or "the whole model"


def _plain(name: str) -> str:
    """A module's name without what wraps models."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).removeprefix(wrapper.removesuffix("."))
    return name


def _values(tensor: Tensor) -> str:
    odd = int((~torch.isfinite(own_part(tensor))).sum())
    return f"{odd:,} of {math.prod(own_part(tensor).shape):,} values"


def _floats(output: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(own_part(tensor)).all())
