"""From the arguments of a patched decoder to those of a sharded, or a stock, forward pass."""

import zlib
from typing import Any

import torch
from torch import nn

from longctx_patch.data import SHARD_KEY
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.agreement import Facts, agree
from longctx_patch.hf.call.fire_check import FirstStep
from longctx_patch.hf.call.inputs import (
    check_whole_rows,
    input_problem,
    tokens_of,
    wants_router_logits,
)
from longctx_patch.hf.call.row import MaskFactory, ShardedRow, made_mask
from longctx_patch.hf.call.sharded import LayerKind, ShardedCall, key_of
from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.hf.model import transformers_api


def prepare_call(
    group: SequenceGroup,
    decoder: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mask_factory: MaskFactory | None,
    seen: set[LayerKind],
    prepared: dict[bytes, ShardedCall],
    first_step: FirstStep,
    checkpoints: LayerCheckpoints,
) -> dict[str, Any]:
    """The decoder's keyword arguments for a sharded or a stock forward pass."""
    shard = kwargs.pop(SHARD_KEY, None)
    if shard is None:
        check_whole_rows(group, kwargs)
        if mask_factory is not None:
            raise ValueError(
                "whole rows with a model that was patched with a mask: the stock path would attend "
                "causally. Pass sharded batches (SequenceShardCollator; in evaluation too), or "
                "handle.unpatch() to generate."
            )
        if decoder.training and group.num_ranks > 1:
            raise ValueError(
                f"this model is patched for {group.num_ranks} ranks per sequence, but the training "
                "batch has no longctx_shard. Use SequenceShardCollator; model.eval() first to "
                "generate or evaluate whole rows; or handle.unpatch()."
            )
        if decoder.training:
            tokens = tokens_of(args, kwargs)
            checkpoints.begin(decoder, checkpoints.propose(decoder, tokens, tokens.shape[1]))
        return kwargs | {transformers_api.CALL_KEY: None}
    tokens = tokens_of(args, kwargs)
    row = ShardedRow.read(shard)
    positions = row.documents.positions(
        group.layout(row.documents).positions(group.group_rank, tokens.device)
    )[None]
    routed = wants_router_logits(decoder, kwargs)
    problem = row.problem or input_problem(kwargs, positions, routed)
    mask = None
    if mask_factory is not None and problem is None:
        mask, problem = made_mask(mask_factory, row)
    misfire = first_step.misfire()
    count = kwargs.get("num_valid_tokens")
    mine = Facts(
        num_tokens=row.documents.num_tokens,
        checksum=zlib.crc32(repr(shard.tolist()).encode()),
        num_rows=tokens.shape[0],
        local_tokens=tokens.shape[1],
        whole_layers=checkpoints.propose(decoder, tokens, row.documents.num_tokens),
        training=int(decoder.training),
        grad_enabled=int(torch.is_grad_enabled()),
        num_valid_tokens=-1 if count is None or problem else int(count),
        mask=0 if mask is None else mask.checksum,
        router_logits=int(routed),
        watched=int(first_step.is_due(decoder)),
        misfired=int(misfire is not None),
        accepted=int(problem is None),
    )
    whole_layers = agree(group, row.documents, mine, misfire=misfire, problem=problem)
    checkpoints.begin(decoder, whole_layers)
    is_plain = row.documents.is_one and mask is None and not routed
    if group.num_ranks == 1 and is_plain and not checkpoints.replays_attention:
        return kwargs | {transformers_api.CALL_KEY: None}
    call = prepared.pop(key_of(shard), None)
    if call is None:
        call = ShardedCall(group, row.documents, mask, row.real_lengths, seen)
    call.fire_check = first_step.begin(decoder)
    return kwargs | {
        "attention_mask": transformers_api.no_mask(tokens.shape[0], tokens.device),
        "position_ids": positions.expand(tokens.shape[0], -1),
        "use_cache": False,
        transformers_api.CALL_KEY: call,
    }
