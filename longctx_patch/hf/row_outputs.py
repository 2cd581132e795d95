"""What a pass over whole rows is asked for, and what a shard's forward then returns: as it would be
of the whole rows, equal on all ranks."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx_patch.config import LossName
from longctx_patch.data.whole_rows import WANTED_KEY, HeadScores, RowsPass, SharedTokens, Wanted
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.gather import all_chosen, all_tokens
from longctx_patch.loss.law import group_value
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout

_OUTPUTS = ("loss", "logits", "router_logits", "aux_loss")
"""Outputs of whole rows; router logits are gathered with the decoder's outputs."""
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
    outputs: Any, rows: RowsPass, documents: Documents, group: SequenceGroup, config: Any
) -> Any:
    """The outputs of a shard's pass, as those of whole rows. Collective over the group.

    `documents` are those of the row, `config` is the model's.
    """
    of_tokens = _OF_TOKENS if rows.wanted in ("log_probs", "top1", "fused", "scores") else ()
    if outputs.get("rope_deltas") is not None:  # transformers 5.17's, for a cache of another pass
        outputs["rope_deltas"] = None
    given = {name: value for name, value in outputs.items() if value is not None}
    if others := [name for name in given if name not in (*_OUTPUTS, *_OF_IMAGES, *of_tokens)]:
        raise ValueError(f"{', '.join(others)} of whole rows: {OTHER_OUTPUTS}")
    layout = group.layout(documents)
    for name in given:
        if name in of_tokens:
            values = in_rows(_all_values(given[name], group, layout), rows)[:, :-1]
            outputs[name] = values if rows.shared is None else _of_labels(values, rows.shared)
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


def _of_labels(values: Tensor, shared: SharedTokens) -> Tensor:
    """`[B, L - 1]` with 0 where a row has no label, since another one may have it."""
    return values.masked_fill(~shared.has_label.to(values.device), 0)


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
            follow one another, and of rows that share tokens.
    """
    if rows.shared is not None:
        places = rows.shared.places.to(tokens.device)
        is_padding = (places < 0).view(*places.shape, *(1,) * (tokens.ndim - 2))
        return tokens[0][places.clamp(min=0)].masked_fill(is_padding, 0)
    found, place = [], 0
    for number, (start, stop) in enumerate(rows.spans):
        size = stop - start
        row, first = (tokens[0], place) if rows.is_packed else (tokens[number], 0)
        around = (0, 0) * (tokens.ndim - 2) + (start, rows.length - stop)
        found.append(pad(row[first : first + size], around))
        place += size
    return torch.stack(found)


ASKING = frozenset({WANTED_KEY, "logits_to_keep"})
"""Arguments that this file reads, and the model doesn't get."""


class Request(NamedTuple):
    """Says what is wanted of a batch `[B, L]` of whole rows."""

    wanted: Wanted
    columns: tuple[int, ...] | None = None
    """Columns whose logits are wanted; None: all of them."""
    scores: HeadScores = HeadScores()
    """How `scores` are made."""


def request_of(given: Mapping[str, Any], loss: LossName) -> Request:
    """Read the arguments of a forward pass; `loss` is that of the config.

    Raises:
        ValueError: what is asked for needs labels, or needs other ones, or needs `loss="logits"`.
    """
    asked, kept = given.get(WANTED_KEY), given.get("logits_to_keep")
    wanted: Wanted = asked or ("fused" if given.get("fused_lm_head") else "loss")
    if given.get("labels") is not None:
        if isinstance(kept, Tensor) or kept:
            raise ValueError(
                "logits_to_keep with labels of whole rows: the loss is over all tokens. Leave out "
                "one of them."
            )
        return Request(wanted)
    if wanted != "loss":
        raise ValueError(
            "log-probabilities of whole rows without labels: they are those of labels. Give "
            "labels, unshifted, -100 for tokens that are not wanted."
        )
    if loss != "logits":
        raise ValueError(
            "whole rows without labels in training: the patched model returns their loss. Give "
            "labels; or take log-probabilities of labels from handle.token_log_probs(batch); or "
            "patch with LongContextConfig(loss='logits') to get logits, of all tokens or by "
            "logits_to_keep. To generate, call model.eval() first."
        )
    return Request("logits", _columns(kept, given["input_ids"].shape[-1]))


def _columns(kept: Any, length: int) -> tuple[int, ...] | None:
    """`logits_to_keep` as columns: the last ones, for a number, or those that a tensor lists."""
    if kept is None or (isinstance(kept, int) and kept == 0):
        return None
    if isinstance(kept, int) and not isinstance(kept, bool) and kept > 0:
        return tuple(range(max(0, length - kept), length))
    is_list = isinstance(kept, Tensor) and kept.ndim == 1 and kept.dtype == torch.int64
    columns = [int(column) for column in kept] if is_list else [length]
    if not all(-length <= column < length for column in columns):
        raise ValueError(
            f"logits_to_keep={str(kept)[:80]} for rows of {length} tokens: it is the number of "
            "last tokens, or an int64 tensor of columns."
        )
    return tuple(column % length for column in columns)


def number_of(num_items: Any) -> float | None:
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
    if is_tensor and num_items.numel() != 1:
        raise ValueError(
            f"num_items_in_batch {list(num_items.shape)}: it is one number, the tokens of the step "
            "over all processes. Use num_items_in_batch.sum()."
        )
    number = float(num_items)
    if not (number == 0 or number >= 1) or not isfinite(number):
        raise ValueError(f"num_items_in_batch={number:g}: it counts tokens, so it is 0, 1 or more.")
    return number


def require_known_group(num_items: Any, num_ranks: int, *, training: bool) -> None:
    """Raise ValueError where a trainer has counted the tokens that does not know of the group.

    A trainer gives its count as a tensor (`LongContextTrainerMixin` as a number), and scales the
    loss by the ranks that its Accelerator takes for replicas. In evaluation it also gathers the
    rows of each rank, which only the mixin does once per group.
    """
    if num_ranks == 1 or not isinstance(num_items, Tensor):
        return
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return  # no trainer without an Accelerator
    known = AcceleratorState._shared_state.get("parallelism_config")
    is_axis = known is not None and known.tp_size == num_ranks and not known.tp_enabled
    if is_axis and training:
        return
    why = "an evaluation by" if is_axis else "a patched model in"
    raise ValueError(
        f"{why} a trainer without LongContextTrainerMixin: the {num_ranks} ranks that share a "
        "sequence would count as replicas. Use LongContextTrainer, or class MyTrainer("
        "LongContextTrainerMixin, SFTTrainer). (num_items_in_batch is a tensor, as trainers give "
        "it; in a loop of your own, give a number.)"
    )
