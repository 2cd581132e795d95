"""What a shard's forward pass returns, as it would be of the whole rows: equal on all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx_patch.data.whole_rows import RowsPass
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.gather import all_chosen, all_tokens
from longctx_patch.hf.call.row import ShardedRow
from longctx_patch.loss.law import group_value
from longctx_patch.sequence.layout import Layout

_OUTPUTS = ("loss", "logits", "router_logits", "aux_loss")
"""Those of whole rows; router logits are gathered with the decoder's outputs."""
_OF_IMAGES = ("image_hidden_states", "image_outputs", "video_outputs")
"""What the model made of whole images, on every rank alike: transformers 5.24 has the last two."""
_OF_TOKENS = (
    *("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"),
)
"""`[B, L]` of a shard, `[B, L - 1]` of whole rows: our log-probabilities, and what TRL's fused head
makes for each label."""
OTHER_OUTPUTS = (
    "outputs have names, and are the loss and what is asked for of the logits; others would be a "
    "shard's. Leave out what asks for them, or train on batches of SequenceShardCollator."
)


def whole_outputs(
    outputs: Any, rows: RowsPass, shard: Tensor, group: SequenceGroup, config: Any
) -> Any:
    """The outputs of a shard's pass, as those of whole rows. Collective over the group.

    `config` is the model's.
    """
    of_tokens = _OF_TOKENS if rows.wanted in ("log_probs", "top1", "fused", "scores") else ()
    if outputs.get("rope_deltas") is not None:  # transformers 5.17's, for a cache of another pass
        outputs["rope_deltas"] = None
    given = {name: value for name, value in outputs.items() if value is not None}
    if others := [name for name in given if name not in (*_OUTPUTS, *_OF_IMAGES, *of_tokens)]:
        raise ValueError(f"{', '.join(others)} of whole rows: {OTHER_OUTPUTS}")
    layout = group.layout(ShardedRow.read(shard).documents)
    for name in given:
        if name in of_tokens:
            outputs[name] = in_rows(_all_values(given[name], group, layout), rows)[:, :-1]
    if rows.wanted in ("fused", "scores"):
        outputs["loss"] = _fused_loss(outputs, rows, config)
    elif rows.wanted == "loss":
        outputs["loss"] = group_value(given["loss"], group.everyone)
    logits = given.get("logits")
    if logits is not None and rows.columns is not None:
        outputs["logits"] = all_chosen(logits[0], group, rows, layout)
    elif logits is not None:
        outputs["logits"] = in_rows(all_tokens(logits, group, layout), rows)
    return outputs


def _all_values(mine: Tensor, group: SequenceGroup, layout: Layout) -> Tensor:
    """`[B, all tokens]`; booleans travel as numbers."""
    if mine.dtype == torch.bool:
        return all_tokens(mine.to(torch.uint8), group, layout).bool()
    return all_tokens(mine, group, layout)


def _fused_loss(outputs: Any, rows: RowsPass, config: Any) -> Tensor:
    """The loss of TRL's `FusedCausalLMOutput` (trl/trainer/utils.py), of whole rows."""
    count = outputs["label_mask"].sum().clamp(min=1) if rows.num_items is None else rows.num_items
    loss: Tensor = -outputs["log_probs"].sum() / count
    if outputs.get("aux_loss") is not None:
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * outputs["aux_loss"]
    return loss


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
