"""LoRA beside frozen linear layers, in few passes over their inputs and outputs.

PEFT computes `base(x) + B(A(x)) * scaling` (Hu et al., arXiv 2106.09685, equation 3) step by step:
beside the product of the base it passes over the layer's output six times, backward likewise, and
under autocast it makes the input float32 and bfloat16 again. Here the second product of the adapter
adds to the output in place, and to the input's gradient in backward; scaling is a factor of the
products (as in Unsloth's adapters). What is kept for backward is the input, in the dtype of the
products, and the tensor of the adapter's rank.

Results equal PEFT's up to rounding. A layer that does more than this runs PEFT's own code, and so
does one within `torch.func` or forward-mode differentiation. Going backward through the gradients
is a RuntimeError.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from longctx_patch.hf.layers.lora_experts import HOME, ExpertsForward, is_pefts
from longctx_patch.memory.last_product import has_hooks, is_plain


def bind_adapters(model: nn.Module) -> Callable[[], None]:
    """Run the LoRA layers that a model has now by few products; return a function that undoes it.

    Names of parameters, saving, merging and switching adapters stay as they are.
    """
    if (layers := sys.modules.get(HOME)) is None:  # nobody has made such a layer
        return lambda: None
    wrappers = [module for module in model.modules() if type(module) is layers.ParamWrapper]
    within = {id(wrapper.base_layer) for wrapper in wrappers}
    bound: dict[nn.Module, LoraForward | ExpertsForward] = {
        wrapper: ExpertsForward(wrapper) for wrapper in wrappers if id(wrapper) not in within
    }
    linear = (module for module in model.modules() if type(module) is layers.Linear)
    bound |= {layer: LoraForward(layer) for layer in linear}
    for module, forward in bound.items():
        vars(module).setdefault("forward", forward)

    def restore() -> None:
        for module, forward in bound.items():
            forward.is_bound = False  # others may have kept it, to put it back later
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]

    return restore


@dataclass(eq=False)
class LoraForward:
    """Takes the place of a LoRA layer's forward."""

    layer: Any = field(repr=False)
    is_bound: bool = True

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.is_bound or args or kwargs or (name := _only_adapter(self.layer, x)) is None:
            stock: Tensor = type(self.layer).forward(self.layer, x, *args, **kwargs)
            return stock
        base, down, up = self.layer.base_layer, self.layer.lora_A[name], self.layer.lora_B[name]
        tensors = [x, base.weight, base.bias, down.weight, up.weight]
        if (dtype := _autocast_dtype(tensors)) is not None:
            tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        return _products(self.layer.scaling[name], *tensors)


def _only_adapter(layer: Any, x: Tensor) -> str | None:
    """Returns the one adapter that is active; None where the layer does more than to add its
    products to those of a frozen base, or is called by what can't follow them."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    (name,) = names
    base, down, up = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    is_ordinary = (
        is_pefts(type(layer).forward)
        and isinstance(layer.scaling[name], int | float)
        and _passes_on(layer.lora_dropout[name])
        and all(map(is_plain, (base, down, up)))
        and down.bias is None
        and up.bias is None
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
    )
    given = [x, base.weight, base.bias, down.weight, up.weight]
    has_one_dtype = len({tensor.dtype for tensor in given if tensor is not None}) == 1
    follows = not (x.is_nested or x.is_meta or _is_transformed())
    takes = is_ordinary and follows and (has_one_dtype or _autocast_dtype(given) is not None)
    return name if takes else None


def _passes_on(dropout: nn.Module) -> bool:
    """Says whether the module returns what it is given, and nobody sees that."""
    is_known = type(dropout) in (nn.Identity, nn.Dropout) and "forward" not in vars(dropout)
    draws = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    return is_known and not draws and not has_hooks(dropout)


def _is_transformed() -> bool:
    """Says whether `torch.func` or forward-mode differentiation is at work."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def _autocast_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype | None:
    """Returns the dtype that autocast gives products of these; None where it changes nothing."""
    found = [tensor for tensor in tensors if tensor is not None]
    kind = found[0].device.type
    if not torch.is_autocast_enabled(kind) or any(t.dtype == torch.float64 for t in found):
        return None
    return torch.get_autocast_dtype(kind)


def _products(
    scaling: float, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor
) -> Tensor:
    """Returns the sum of the products, `scaling` times that of LoRA, of `x [..., I]`, the frozen
    `weight [O, I]` and `bias [O]`, LoRA's A as `down [R, I]` and its B as `up [O, R]`, all of
    one dtype.

    The result gets its values once its node has saved what backward needs. A recompute of
    torch's checkpoint ends there if nobody needs this result, as it does for a linear layer.
    """
    x_NI = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        low_NR = x_NI @ down.t()
    out: Tensor = _LoraProducts.apply(x, weight, down, up, low_NR, scaling)
    with torch.no_grad():
        out_NO = out.view(-1, len(weight))
        if bias is None:
            torch.mm(x_NI, weight.t(), out=out_NO)
        else:
            torch.addmm(bias, x_NI, weight.t(), out=out_NO)
        out_NO.addmm_(low_NR, up.t(), alpha=scaling)
    return out


class _LoraProducts(torch.autograd.Function):
    """Makes the result of `_products`, without its values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        down: Tensor,
        up: Tensor,
        low_NR: Tensor,
        scaling: float,
    ) -> Tensor:
        of_x, _, of_down, of_up, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if of_down else None,
            low_NR if of_up else None,
            weight if of_x else None,
            down if of_x else None,
            up if of_x or of_down else None,
        )
        ctx.scaling, ctx.shape = scaling, x.shape
        return x.new_empty(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):  # someone may go backward within it
            return _gradients(ctx, grad.reshape(-1, grad.shape[-1]))


def _gradients(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
    x, low_NR, weight, down, up = ctx.saved_tensors
    of_x = of_down = of_up = None
    if up is not None:
        low_grad_NR = _product(grad_NO, up, ctx.scaling)
    if weight is not None:
        of_x = (grad_NO @ weight).addmm_(low_grad_NR, down).view(ctx.shape)
    if x is not None:
        of_down = low_grad_NR.t() @ x.reshape(-1, x.shape[-1])
    if low_NR is not None:
        of_up = _product(grad_NO.t(), low_NR, ctx.scaling)
    return of_x, None, of_down, of_up, None, None


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Multiplies by the factor before it rounds."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=factor)
