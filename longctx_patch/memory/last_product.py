"""Run an MLP again for its gradients, without its last matrix product.

An MLP is run again for what its operations keep, and what it returns is not among that: where it
returns what a linear layer gives, that need not be computed, a third of the work of gate, up and
down. (torch's checkpoint does likewise: it ends a recompute with the last tensor that was kept.)

What stands in for the result has its shape and no memory. Nobody may look at it, so it takes an MLP
that is known to hand the result on as it is, and a layer that is nothing but a linear one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
FORWARD, LINEAR = nn.Linear.forward, functional.linear
"""As torch has them: some tools put others in their place."""


def is_plain(linear: object) -> bool:
    """Whether it is `F.linear` of a tensor, and nobody looks at what goes in or comes out."""
    return (
        type(linear) is nn.Linear
        and (nn.Linear.forward, functional.linear) == (FORWARD, LINEAR)
        and "forward" not in vars(linear)
        and linear._compiled_call_impl is None
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and not (linear._backward_hooks or linear._backward_pre_hooks)
        and not any(getattr(torch_module, name) for name in GLOBAL_HOOKS)
        and all(
            type(tensor) in (Tensor, nn.Parameter, type(None))
            for tensor in (linear.weight, linear.bias)
        )
    )


@contextmanager
def results_of(linear: nn.Linear | None) -> Iterator[list[Tensor]]:
    """Within, what the layer gives is written down."""
    results: list[Tensor] = []
    if linear is None:
        yield results
        return

    def forward(hidden: Tensor) -> Tensor:
        results.append(FORWARD(linear, hidden))
        return results[-1]

    with _other_forward(linear, forward):
        yield results


@contextmanager
def left_out(linear: nn.Linear | None) -> Iterator[None]:
    """Within, the layer gives something of its result's shape and dtype that has its gradients."""
    if linear is None:
        yield
        return
    with _other_forward(linear, lambda hidden: stand_in(hidden, linear.weight, linear.bias)):
        yield


@contextmanager
def _other_forward(linear: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In this thread; another one may be evaluating the same model."""
    thread = get_ident()

    def forward_here(hidden: Tensor) -> Tensor:
        return forward(hidden) if get_ident() == thread else FORWARD(linear, hidden)

    vars(linear)["forward"] = forward_here
    try:
        yield
    finally:
        vars(linear).pop("forward", None)


def stand_in(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In place of `F.linear(hidden, weight, bias)`, under autocast too; its gradients to the bit,
    where hidden states are contiguous."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = _cast(hidden, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    out: Tensor = _StandIn.apply(hidden, weight, bias)
    return out


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = hidden.shape
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (rows @ weight).view(ctx.shape) if wants_hidden else None,
            rows.t() @ hidden.reshape(-1, hidden.shape[-1]) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
