"""LoRA beside frozen linear layers, in few passes over their inputs and outputs.

PEFT computes `base(x) + B(A(x)) * scaling` (Hu et al., arXiv 2106.09685, equation 3) step by step:
beside the product of the base it passes over the layer's output six times, backward likewise, and
under autocast it makes the input float32 and bfloat16 again. Here the second product of the adapter
adds to the output in place, and to the input's gradient in backward; scaling is a factor of the
products (as in Unsloth's adapters). What is kept for backward is the input, once for all layers
that read it, and the tensor of the adapter's rank.

Results equal PEFT's up to rounding, which happens less often. A layer that does more than this runs
PEFT's own code.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longctx_patch.hf.layers.lora_experts import ExpertsForward
from longctx_patch.memory.last_product import is_plain

_HOME = "peft.tuners.lora.layer"


def bind_adapters(model: nn.Module) -> Callable[[], None]:
    """Run the LoRA layers that a model has now by few products; return a function that undoes it.

    Names of parameters, saving, merging and switching adapters stay as they are.
    """
    if (peft := sys.modules.get(_HOME)) is None:  # nobody has made such a layer
        return lambda: None
    wrappers = [module for module in model.modules() if type(module) is peft.ParamWrapper]
    within = {id(wrapper.base_layer) for wrapper in wrappers}
    forwards: dict[nn.Module, LoraForward | ExpertsForward] = {
        wrapper: ExpertsForward(wrapper) for wrapper in wrappers if id(wrapper) not in within
    }
    linear = (module for module in model.modules() if type(module) is peft.Linear)
    forwards |= {layer: LoraForward(layer) for layer in linear}
    for module, forward in forwards.items():
        vars(module).setdefault("forward", forward)

    def restore() -> None:
        for module in model.modules():
            if isinstance(vars(module).get("forward"), LoraForward | ExpertsForward):
                del vars(module)["forward"]

    return restore


@dataclass(eq=False)
class LoraForward:
    """Takes the place of a LoRA layer's forward."""

    layer: Any

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        factors = None if args or kwargs else _factors(self.layer, hidden)
        if factors is None:
            stock: Tensor = type(self.layer).forward(self.layer, hidden, *args, **kwargs)
            return stock
        out: Tensor = _LoraProducts.apply(*factors)
        return out


class _Factors(NamedTuple):
    """What a layer computes with, all tensors in the dtype of its products."""

    hidden: Tensor
    """`[..., I]`."""
    weight: Tensor
    """`[O, I]`, frozen."""
    bias: Tensor | None
    """`[O]`, frozen."""
    down: Tensor
    """LoRA's A, `[R, I]`."""
    up: Tensor
    """LoRA's B, `[O, R]`."""
    scaling: float


def _factors(layer: Any, hidden: Tensor) -> _Factors | None:
    """The factors of one active adapter beside a frozen base; None if the layer does more, or less,
    than to add their products."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    (name,) = names
    base, down, up = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    draws = not isinstance(dropout, nn.Identity) and dropout.training and dropout.p > 0
    if draws or not all(map(is_plain, (base, down, up))):
        return None
    if any(linear.bias is not None for linear in (down, up)):
        return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    given = [hidden, base.weight, base.bias, down.weight, up.weight]
    dtypes = {tensor.dtype for tensor in given if tensor is not None}
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        dtype = torch.get_autocast_dtype(kind)
        given = [None if tensor is None else tensor.to(dtype) for tensor in given]
    elif len(dtypes) > 1:
        return None
    return _Factors(*given, scaling=layer.scaling[name])  # type: ignore[misc]


class _LoraProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        hidden_NI = hidden.reshape(-1, hidden.shape[-1])
        low_NR = hidden_NI @ down.t()
        out_NO = functional.linear(hidden_NI, weight, bias).addmm_(low_NR, up.t(), alpha=scaling)
        _, _, _, trains_down, trains_up, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            hidden if trains_down else None, low_NR if trains_up else None, weight, down, up
        )
        ctx.scaling = scaling
        # A view would refuse to be changed in place, as a model's code may do with a result.
        return torch.ops.aten._unsafe_view(out_NO, [*hidden.shape[:-1], len(weight)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, low_NR, weight, down, up = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        low_grad_NR = (grad_NO @ up).mul_(ctx.scaling)
        hidden_grad = None
        if ctx.needs_input_grad[0]:
            hidden_grad = (grad_NO @ weight).addmm_(low_grad_NR, down)
            hidden_grad = hidden_grad.view(*grad.shape[:-1], weight.shape[1])
        down_grad = up_grad = None
        if hidden is not None:
            down_grad = low_grad_NR.t() @ hidden.reshape(-1, hidden.shape[-1])
        if low_NR is not None:
            up_grad = (grad_NO.t() @ low_NR).mul_(ctx.scaling)
        return hidden_grad, None, None, down_grad, up_grad, None
