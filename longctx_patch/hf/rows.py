"""Whole rows in, whole rows out: batches as any trainer makes them, equal on all ranks of a group.

The patched model cuts such a batch itself and gives back one replica's loss, with the same value on
every rank of the group. A trainer that takes these ranks for one replica, and averages gradients
over all ranks as DDP and FSDP do, trains with one process's numbers. In evaluation mode each rank
runs the whole rows by itself, through the stock path.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.data import ROWS_KEY, SHARD_KEY, SequenceShardCollator
from longctx_patch.data.whole_rows import READ, RowsPass, read_rows
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.row_outputs import whole_outputs
from longctx_patch.transport.meeting import Meeting, meet

Arguments = dict[str, Any]


def bind_rows(model: PreTrainedModel, group: SequenceGroup) -> Callable[[], None]:
    """Let the model cut whole rows; return a function that undoes it. Bind it last."""
    if group.num_ranks == 1:  # the stock path takes whole rows
        return lambda: None
    signature = inspect.signature(model.forward)
    collate = SequenceShardCollator(group.config, group_rank=group.group_rank, pad_token_id=0)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[Any, Arguments]:
        given = signature.bind_partial(*args).arguments | kwargs
        is_step = model.training and given.get("past_key_values") is None
        if not is_step or given.get(SHARD_KEY) is not None:
            return args, kwargs
        return (), _shard_of(given, collate, group)

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: Arguments, outputs: Any) -> Any:
        rows = kwargs.get(ROWS_KEY)
        return outputs if rows is None else whole_outputs(outputs, rows, kwargs[SHARD_KEY], group)

    return transformers_api.hook(model, before, after, around=True)


def _shard_of(given: Arguments, collate: SequenceShardCollator, group: SequenceGroup) -> Arguments:
    """This rank's shard of whole rows. Collective: all ranks refuse what one of them refuses."""
    shard, problem = {}, None
    try:
        shard = _cut(given, collate)
    except ValueError as error:
        problem = error
    except Exception as error:  # whatever it is, the other ranks must learn of it, not wait
        problem = ValueError(f"these whole rows can't be read: {error!r}")
    meet(group.everyone, Meeting.ROWS, problem=problem)
    others = {name: value for name, value in given.items() if name not in READ}
    return others | {"num_items_in_batch": None} | shard


def _cut(given: Mapping[str, Any], collate: SequenceShardCollator) -> Arguments:
    for name, fix in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(f"{name} with whole rows: {fix}")
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False with whole rows: outputs have names. Leave it out.")
    if given.get("labels") is None:
        raise ValueError(
            "whole rows without labels in training: the patched model returns their loss. Give "
            "labels, or call model.eval() first to generate; a batch of SequenceShardCollator "
            "without labels gives the logits of a shard."
        )
    whole = read_rows(given)
    rows = RowsPass(
        _number_of(given.get("num_items_in_batch")), whole.spans, whole.length, whole.is_packed
    )
    shard: Arguments = dict(collate.shard(whole.rows))
    described = shard.pop(SHARD_KEY)
    device = given["input_ids"].device
    on_device = {name: value.to(device) for name, value in shard.items()}
    return on_device | {SHARD_KEY: described, ROWS_KEY: rows}


_REFUSED = {
    "inputs_embeds": "padding and documents are read with input_ids. Give input_ids alone.",
    "shift_labels": "labels of whole rows are unshifted, so this looks like a shard whose "
    "longctx_shard is missing. Pass the batch of SequenceShardCollator unchanged, or whole rows "
    "with labels alone.",
    "num_valid_tokens": "it belongs to batches of SequenceShardCollator. Give num_items_in_batch, "
    "by which the sum of the replica's token losses is divided.",
}


def _number_of(num_items: Any) -> float | None:
    """transformers' count of the step's tokens, as a number of this process.

    FSDP2 with mixed precision rounds tensors of floats that a model is given, so a count in half
    precision is no count.
    """
    if num_items is None:
        return None
    is_tensor = isinstance(num_items, Tensor)
    if is_tensor and num_items.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"num_items_in_batch is a tensor of {num_items.dtype}, which rounds a count of tokens: "
            "FSDP2's mixed precision casts it on the way. Pass int(num_items_in_batch)."
        )
    number = float(num_items)
    if not number >= 0:  # nor NaN
        raise ValueError(f"num_items_in_batch={number:g}: it is a number of tokens, 0 or more.")
    return number
