"""What a pass over whole rows is to return, by its arguments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.config import LossName
from longctx_patch.data.whole_rows import WANTED_KEY, HeadScores, Wanted

ASKING = frozenset({WANTED_KEY, "logits_to_keep"})
"""Arguments that this file reads, and the model doesn't get."""


class Request(NamedTuple):
    """What is wanted of a batch `[B, L]` of whole rows."""

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
