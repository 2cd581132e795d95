"""LoRA on experts whose weights are one tensor `[E, ...]`, multiplied by its factors.

PEFT adds `scaling * B A` of every expert to the weights in each forward, in the weights' dtype, and
takes the gradient of the sum as a whole: a copy of all experts' weights kept for backward, a
gradient of that size, and the work of training them. Here tokens go through the frozen weights and
through the factors, as in the layers of `lora_products.py`. Gradients can be differentiated once.

transformers' own code chooses experts, sorts tokens by them and adds up their results. It gets
`_AdaptedWeight` in place of a weight, which knows one thing: to be multiplied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longctx_patch.memory.last_product import has_hooks

HOME = "peft.tuners.lora.layer"
"""PEFT's module of LoRA layers."""
GROUPED = "grouped_mm"
"""What transformers calls experts' products over tokens that are sorted by expert."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED_BYTES = 16
"""The bytes that a row of the rank's numbers is a multiple of, as torch's grouped product wants."""


def is_pefts(forward: Any) -> bool:
    """Says whether a layer's forward is PEFT's; some tools put theirs around it."""
    return forward.__module__ == HOME and not hasattr(forward, "__wrapped__")


@dataclass(eq=False)
class ExpertsForward:
    """Takes the place of the forward of experts' outermost wrapper."""

    wrapper: Any = field(repr=False)
    is_bound: bool = True

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = _adapted_weights(self.wrapper) if self.is_bound and not kwargs else None
        if weights is None:
            stock: Tensor = type(self.wrapper).forward(self.wrapper, x, *args, **kwargs)
            return stock
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        own = _Experts(self.wrapper.get_base_layer(), weights)
        out: Tensor = ALL_EXPERTS_FUNCTIONS[GROUPED](own, x, *args)
        return out


class _Experts:
    """Stands in for experts, with some weights adapted."""

    def __init__(self, experts: Any, weights: dict[str, "_AdaptedWeight"]) -> None:
        self._experts = experts
        vars(self).update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _AdaptedWeight:
    """The sum of frozen weights and the products `left @ right` of each expert, never added up."""

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """`[E, M, N]`, `[E, M, R]` and `[E, R, N]`."""
        self.weight, self.left, self.right = weight, left, right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)

    def transpose(self, first: int, second: int) -> "_AdaptedWeight":
        """Exchanges the last two dimensions."""
        if {first, second} not in ({-1, -2}, {1, 2}):
            raise ValueError(f"transpose({first}, {second}): experts stay the first dimension.")
        return _AdaptedWeight(
            self.weight.transpose(1, 2), self.right.transpose(1, 2), self.left.transpose(1, 2)
        )

    @classmethod
    def __torch_function__(
        cls, product: Callable[..., Tensor], _: Any, args: Any, kwargs: Any = None
    ) -> Tensor:
        """Computes `product(x, weight, ...)`, which is linear in `weight`."""
        hidden, adapted, *rest = args
        if not isinstance(adapted, cls) or isinstance(hidden, cls):
            raise TypeError(f"{product} of an adapted weight: it is the second factor of products.")

        def times(given: Tensor, weight: Tensor) -> Tensor:
            return product(given, weight, *rest, **(kwargs or {}))

        low = times(hidden, adapted.left)
        return times(hidden, adapted.weight).add_(times(low, adapted.right))


def _adapted_weights(outermost: Any) -> dict[str, _AdaptedWeight] | None:
    """Returns weights by name; None where PEFT's own code has to run."""
    if not (is_pefts(type(outermost).forward) and _are_grouped(outermost.get_base_layer())):
        return None
    wrappers = list(_wrappers(outermost))
    if any(has_hooks(wrapper) or "forward" in vars(wrapper) for wrapper in wrappers[1:]):
        return None
    weights = {wrapper.parameter_name: _adapted_weight(wrapper) for wrapper in wrappers}
    found = {name: weight for name, weight in weights.items() if weight is not None}
    return found if len(found) == len(wrappers) else None


def _are_grouped(experts: Any) -> bool:
    """Says whether transformers' own code runs these experts by grouped products, on one rank."""
    config = getattr(experts, "config", None)
    return (
        getattr(config, "_experts_implementation", None) == GROUPED
        and getattr(experts, "_is_expert_parallel", True) is False
        and type(experts).forward.__module__.startswith("transformers.models.")
        and "forward" not in vars(experts)
        and "parametrizations" not in experts._modules
        and not has_hooks(experts)
    )


def _adapted_weight(wrapper: Any) -> _AdaptedWeight | None:
    """Returns the weight with its one active adapter; None where that is more than two factors of
    frozen experts."""
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    weight = wrapper.get_param()
    if len(names) != 1 or wrapper.disable_adapters or wrapper.merged:
        return None
    if weight.ndim != 3 or weight.dtype not in _DTYPES or weight.requires_grad:
        return None
    left, right, scaling = wrapper.get_delta_factors(names[0])
    if left.shape[-1] * left.element_size() % _ALIGNED_BYTES:
        return None
    return _AdaptedWeight(weight, (left * scaling).contiguous(), right.contiguous())


def _wrappers(outermost: Any) -> Iterator[Any]:
    """Yields wrappers, each of one weight and around the next wrapper."""
    wrapper = outermost
    while type(wrapper) is type(outermost):
        yield wrapper
        wrapper = wrapper.base_layer
