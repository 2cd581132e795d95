"""Run a function again for its gradients, without its last matrix product.

A function is run again for what its operations keep, and what it returns is not among that. Where
its last operation is a linear layer, as in an MLP, nobody needs what that gives, which is a third
of the work of gate, up and down. (torch's checkpoint does likewise: it ends a recompute with the
last tensor that was kept.)

Found by identity: of the calls of `F.linear` in a run, one has made the very tensor that came out.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Counts the linear layers that run while it is entered."""

    def __init__(self, left_out: int | None = None) -> None:
        """`left_out`: the number of one that is not computed, from 0."""
        super().__init__()
        self._left_out = left_out
        self._count = 0
        self._last: tuple[Tensor, int] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        number, self._count = self._count, self._count + 1
        if number == self._left_out:
            return linear_left_out(*args, **(kwargs or {}))
        out: Tensor = func(*args, **(kwargs or {}))
        self._last = out, out._version
        return out

    def number_of(self, out: Tensor) -> int | None:
        """Which layer's output this is, as it left the layer; None: not that of the last one."""
        if self._last is None:
            return None
        last, version = self._last
        return self._count - 1 if out is last and out._version == version else None


def run_and_look(function: Callable[[Tensor], Tensor], hidden: Tensor) -> tuple[Tensor, int | None]:
    """(what it returns, the number of the linear layer that made it: what `without` takes)."""
    with Products() as products:
        out = function(hidden)
    return out, products.number_of(out)


def can_be_watched(module: nn.Module) -> bool:
    """Not where code is compiled for what it calls, nor where hooks look at what comes out."""
    within = [each for each in module.modules() if each is not module]
    return not any(each._forward_hooks for each in within) and not any(
        each._compiled_call_impl is not None for each in (module, *within)
    )


def without(number: int | None) -> AbstractContextManager[object]:
    """Within, so many linear layers run, and not the one after them."""
    return nullcontext() if number is None else Products(number)


def linear_left_out(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In place of `F.linear(hidden, weight, bias)`: something of its shape and dtype, with its
    gradients to the bit."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = _cast(hidden, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    out: Tensor = _LeftOut.apply(hidden, weight, bias)
    return out


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does."""
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if casts else tensor


class _LeftOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (rows @ weight).view(hidden.shape) if wants_hidden else None,
            rows.t() @ hidden.reshape(-1, hidden.shape[-1]) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
