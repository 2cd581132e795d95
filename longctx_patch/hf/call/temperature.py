"""Queries that layers scale by their place in the row, counted by themselves (Llama 4).

Layers without rotary embeddings get no positions: they count the tokens of their input, from the
number that a cache has seen on. On a shard that is another place than in the document. So such a
layer is handed, in the place of a cache, what makes its own sum the position of each token; the
law itself (https://huggingface.co/papers/2501.19399) stays transformers' own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.transformers_api import CALL_KEY


class Places:
    """What a layer takes for a cache: it keeps nothing, and has seen as much as puts each token
    where it is."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` `[L]`: of the layer's tokens, in their documents."""
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """`[L]`: the position of each token less its index."""
        return self._before

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values as they are: those of other ranks come with the plan."""
        return key, value


def bind_temperature(model: nn.Module) -> Callable[[], None]:
    """Tell layers that count by themselves where tokens are; return a function that undoes it."""
    hooks = [
        module.register_forward_pre_hook(_tell_places, with_kwargs=True)
        for module in transformers_api.counting_modules(model)
    ]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def _tell_places(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = kwargs.get(CALL_KEY)
    if call is None:
        return args, kwargs
    return args, kwargs | {transformers_api.cache_name(module): Places(call.positions)}
