"""Refuses options of a sharded batch that would be dropped silently."""

from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.model import transformers_api

_KNOWN = (
    transformers_api.DECODER_ARGUMENTS | transformers_api.HARMLESS_OPTIONS | {"num_valid_tokens"}
)
KNOWN_TO_LAYERS = _KNOWN | transformers_api.LAYER_OPTIONS | {"sliding_window"}


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for candidate in (args[0] if args else None, kwargs.get("input_ids")):
        if candidate is not None:
            return candidate
    if kwargs.get("inputs_embeds") is None:
        raise ValueError("the batch has neither input_ids nor inputs_embeds.")
    return kwargs["inputs_embeds"]


def check_whole_rows(group: SequenceGroup, kwargs: dict[str, Any]) -> None:
    """Refuse a batch without longctx_shard whose positions show that it is not whole rows."""
    given = kwargs.get("position_ids")
    padded = kwargs.get("attention_mask") is not None
    goes_on = transformers_api.cache_given(kwargs) is not None
    if group.num_ranks == 1 or given is None or padded or goes_on or given.ndim == 3:
        return  # shards have no rows of positions for images
    if kwargs.get("shift_labels") is not None or not _count_from_zero(given):
        raise ValueError(
            f"position_ids start {given.flatten()[:4].tolist()}: this looks like a shard, but its "
            "longctx_shard is missing. Pass the batch of SequenceShardCollator unchanged, or whole "
            "rows without shift_labels, with positions from 0 in each document."
        )


def _count_from_zero(positions: Tensor) -> bool:
    """Says whether positions count up, and start at 0 wherever they start."""
    starts, steps = positions[..., 0], positions.diff(dim=-1)
    return bool((starts == 0).all() and ((steps == 1) | (positions[..., 1:] == 0)).all())


def wants_router_logits(decoder: nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    if asked is None:
        asked = getattr(decoder.config, "output_router_logits", False)
    return bool(asked)


def input_problem(
    kwargs: dict[str, Any], positions: Tensor, wants_router_logits: bool
) -> str | None:
    """Says what this rank can't compute with, in words; `positions` `[1, L]` are the layout's."""
    return (
        _count_problem(kwargs.get("num_items_in_batch"), kwargs.get("num_valid_tokens"))
        or _mask_problem(kwargs, wants_router_logits)
        or _position_problem(kwargs.get("position_ids"), positions)
        or option_problem(kwargs)
    )


def _count_problem(num_items: Any, num_valid_tokens: Any) -> str | None:
    if num_items is not None:
        return (
            "num_items_in_batch with a sharded batch: transformers' Trainer counts and scales it "
            "in ways that change with its version; the loss would be off by the sequence degree. "
            "Pass num_valid_tokens=count_valid_tokens(batches), or neither."
        )
    if num_valid_tokens is not None and not _is_count(num_valid_tokens):
        return (
            f"num_valid_tokens={short(num_valid_tokens)}: it is a whole number of tokens, 0 or "
            "more, counted over all processes. Use count_valid_tokens(batches), or leave it out."
        )
    return None


def _mask_problem(kwargs: dict[str, Any], wants_router_logits: bool) -> str | None:
    if cache := transformers_api.cache_given(kwargs):
        return (
            f"{cache} with a sharded batch: a cache holds one rank's keys only. Generate "
            "with plain inputs (no longctx_shard), or drop the cache."
        )
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    if not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        return (
            f"attention_mask {short(mask)} with a sharded batch: padding and documents are known "
            "from the collator, which gets attention_mask and seq_lengths with the rows; other "
            "masks go to patch(model, config, mask=...). Pass the batch unchanged."
        )
    if wants_router_logits:
        return (
            f"attention_mask {short(mask)} with router logits of a sharded batch: transformers "
            "would weigh the tokens of all ranks by this rank's mask. Pass no attention_mask; "
            "padding is known from the collator."
        )
    return None


def _position_problem(given: Tensor | None, positions: Tensor) -> str | None:
    """Positions that start at 0 in each shard would rotate keys wrongly without an error."""
    if given is None or _same_positions(given, positions):
        return None
    return (
        f"{_first_difference(given, positions)}: the collator has another config than patch "
        "(degrees, layout, group_rank), or these are not its position_ids. Give both the same "
        "config, and pass the collator's position_ids, or none."
    )


def option_problem(kwargs: dict[str, Any]) -> str | None:
    for option, value in kwargs.items():
        harmless = (None, True) if option == "is_causal" else (None, False)
        if option in _KNOWN or any(value is other for other in harmless):
            continue
        return (
            f"{option}={short(value)} with a sharded batch: attention would silently drop it, so "
            "it is refused. Remove it, or handle.unpatch() and train on one process."
        )
    return None


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and int(value) >= 0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def short(value: object) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _first_difference(given: Tensor, positions: Tensor) -> str:
    num_tokens = positions.shape[1]
    if given.ndim != 2 or given.shape[1] != num_tokens:
        return f"position_ids {list(given.shape)} for the {num_tokens} tokens of this rank"
    row, token = (given != positions.to(given)).nonzero()[0].tolist()
    return (
        f"position_ids[{row}, {token}] is {given[row, token].item()}, but this rank's token there "
        f"has position {int(positions[0, token])} in its document"
    )


def _same_positions(given: Tensor, positions: Tensor) -> bool:
    if given.ndim != 2 or given.shape[1] != positions.shape[1]:
        return False
    return torch.equal(given, positions.expand_as(given).to(given))


def vocabulary_problem(model: nn.Module, least: int, most: int) -> str | None:
    """Says what is wrong with tokens from `least` to `most`, in words.

    On a GPU an id without an embedding ends the process in the middle of a kernel, on the rank that
    has the token; the others would wait for it.

    Args:
        model: has transformers' `get_input_embeddings`; adapters may wrap the table.
    """
    found = model.get_input_embeddings().modules()  # type: ignore[operator]
    table = next((module for module in found if isinstance(module, nn.Embedding)), None)
    if table is None or (least >= 0 and most < table.num_embeddings):
        return None
    return (
        f"input_ids from {least} to {most}: the model's embedding has "
        f"{table.num_embeddings} rows. Check the tokenizer against the model's vocab_size."
    )
