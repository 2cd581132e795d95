"""What a shard's forward pass returns, as it would be of the whole rows: equal on all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx_patch.data.whole_rows import RowsPass
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.gather import all_tokens
from longctx_patch.hf.call.row import ShardedRow
from longctx_patch.loss.law import group_value

_OUTPUTS = ("loss", "logits", "router_logits", "aux_loss")
"""Those of whole rows; router logits are gathered with the decoder's outputs."""
OTHER_OUTPUTS = (
    "outputs have names, and are the loss and what is asked for of the logits; others would be a "
    "shard's. Leave out what asks for them, or train on batches of SequenceShardCollator."
)


def whole_outputs(outputs: Any, rows: RowsPass, shard: Tensor, group: SequenceGroup) -> Any:
    """The outputs of a shard's pass, as those of whole rows."""
    others = [name for name, value in outputs.items() if name not in _OUTPUTS and value is not None]
    if others:
        raise ValueError(f"{', '.join(others)} of whole rows: {OTHER_OUTPUTS}")
    outputs["loss"] = group_value(outputs["loss"], group.everyone)
    if outputs.get("logits") is not None:
        layout = group.layout(ShardedRow.read(shard).documents)
        outputs["logits"] = in_rows(all_tokens(outputs["logits"], group, layout), rows)
    return outputs


def in_rows(tokens: Tensor, rows: RowsPass) -> Tensor:
    """`[rows, columns, ...]` of a batch from what its padded or joined rows have, 0 on padding.

    Args:
        tokens: `[rows, padded length, ...]`, or `[1, padded length, ...]` of packed rows, which
            follow one another.
    """
    found, place = [], 0
    for number, (start, stop) in enumerate(rows.spans):
        size = stop - start
        row, first = (tokens[0], place) if rows.is_packed else (tokens[number], 0)
        around = (0, 0) * (tokens.ndim - 2) + (start, rows.length - stop)
        found.append(pad(row[first : first + size], around))
        place += size
    return torch.stack(found)
