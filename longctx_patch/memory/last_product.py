"""Run an MLP again for its gradients, without its last matrix product.

Backward of a tile runs the MLP again for the tensors that its operations save. The MLP's result is
not among them, so where it is the unchanged result of a linear layer, that product need not be
computed: a third of the work of gate, up and down. (torch's checkpoint likewise ends a recompute
with the last tensor that was kept.)

A tensor of the result's shape, without memory of its own, stands in for the result. Its values must
not be read. So the layer must be nothing but a linear one (`is_plain`) in an MLP whose code is
known, and the caller checks that the MLP returned the tensor that stood in (`left_out`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
FORWARD, LINEAR = nn.Linear.forward, functional.linear
"""Torch's own functions, which some tools replace."""


def has_hooks(module: nn.Module) -> bool:
    """Says whether a hook sees what the module is given, or its results or gradients."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(getattr(torch_module, name) for name in GLOBAL_HOOKS)
    )


def is_plain(linear: object) -> bool:
    """Says whether the module runs `F.linear` on plain tensors that no hook sees."""
    return (
        type(linear) is nn.Linear
        and (nn.Linear.forward, functional.linear) == (FORWARD, LINEAR)
        and "forward" not in vars(linear)
        and linear._compiled_call_impl is None
        and not has_hooks(linear)
        and all(
            type(tensor) in (Tensor, nn.Parameter, type(None))
            for tensor in (linear.weight, linear.bias)
        )
    )


@contextmanager
def left_out(linear: nn.Linear | None) -> Iterator[list[Tensor]]:
    """Within the context, tensors of the right shape and dtype stand in for the layer's results.

    Gradients pass through them as through the results. Each is appended to the list that is
    yielded. Other threads, which may be evaluating the same model, get the results themselves.
    """
    stood_in: list[Tensor] = []
    if linear is None:
        yield stood_in
        return
    thread = get_ident()

    def forward(hidden: Tensor) -> Tensor:
        if get_ident() != thread:
            return FORWARD(linear, hidden)
        stood_in.append(stand_in(hidden, linear.weight, linear.bias))
        return stood_in[-1]

    vars(linear)["forward"] = forward
    try:
        yield stood_in
    finally:
        vars(linear).pop("forward", None)


def stand_in(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Stand in for `F.linear(hidden, weight, bias)`, under autocast too.

    Gradients are the same to the bit where hidden states are contiguous.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = _cast(hidden, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    out: Tensor = _StandIn.apply(hidden, weight, bias)
    return out


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does."""
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
