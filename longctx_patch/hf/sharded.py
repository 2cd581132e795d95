"""One forward pass of a patched decoder over a shard: checks before it, attention inside it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.groups import SequenceGroup
from longctx_patch.operator import AttentionCall

# What transformers hands to every attention function and causal attention has no use for.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "num_valid_tokens",
        "shift_labels",
        "output_hidden_states",
        "return_dict",
        "is_causal",
    }
)


@dataclass(frozen=True)
class ShardedCall:
    """Travels with one forward pass, from the decoder to each of its attention layers."""

    group: SequenceGroup
    num_tokens: int


def sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    call: ShardedCall,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `[B, H, L, D]` in, `[B, L, H, D]` out.

    Raises ValueError for every option that would change the numbers and is not covered.
    """
    _refuse_options(module, dropout, kwargs)
    if torch.is_autocast_enabled(query.device.type):
        # Stock attention functions are on autocast's list; rotary embeddings leave q, k in float32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    num_heads, head_dim = query.shape[1], query.shape[3]
    attention = AttentionCall(
        call.group,
        call.num_tokens,
        head_dim**-0.5 if scaling is None else scaling,
        num_heads,
        key.shape[1],
    )
    out, _ = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out, None


def _refuse_options(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    name = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if dropout:
        raise ValueError(
            f"{name}: dropout={dropout} in attention. Load the model with attention_dropout=0.0."
        )
    for option, value in options.items():
        if option in _HARMLESS or value is None or value is False:
            continue
        raise ValueError(
            f"{name}: got {option}={_short(value)}, which sequence parallelism does not cover and "
            "would silently drop. Remove it, or handle.unpatch() and train on one process."
        )


def _short(value: object) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
