"""Packed rows on a stock path that does not keep their documents apart: refused.

Recurrences and short convolutions of transformers carry what they have of one document into the
next one, and masks of some families are made without positions, both without an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OF_STATES = (
    "on the stock path, where recurrent layers of this model would carry the state of one into the "
    "next. In evaluation call the model with labels within handle.sharing_evaluation(), which "
    "keeps them apart, or give one document a row. In training leave attention_mask and the cache "
    "out, and call the model, not its decoder."
)
OF_MASKS = (
    "and transformers' own model of this type doesn't look for documents, so that they would see "
    "each other. Give one document a row, padded on the right; or train on batches of "
    "SequenceShardCollator with seq_lengths, which keep them apart."
)


def check_one_document(kwargs: Mapping[str, Any], why: str = OF_STATES) -> None:
    """Raise ValueError for whole rows with several documents; `kwargs` are a call's.

    Like transformers, which reads the same positions for its masks, this waits for the device, but
    not where one token at a time is generated.
    """
    said = (
        _by_positions(kwargs.get("position_ids"), _padding_mask(kwargs.get("attention_mask")))
        or _by_numbers(kwargs.get("seq_idx"))
        or _by_edges(kwargs.get("cu_seq_lens_q"))
        or _by_lengths(kwargs.get("seq_lengths"))
    )
    if said is not None:
        raise ValueError(f"{said}: several documents in a row {why}")


def _padding_mask(mask: Any) -> Tensor | None:
    """`[B, any]`, of which the last columns are those of the tokens; generate() makes masks ahead,
    one for each kind of layer."""
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return next((m for m in masks if isinstance(m, Tensor) and m.ndim == 2), None)


def _by_positions(positions: Tensor | None, mask: Tensor | None) -> str | None:
    """Returns what says where positions of neighbouring tokens do not count up by one."""
    if positions is None or positions.shape[-1] < 2:
        return None
    has_axes = positions.ndim == 3 and len(positions) == 3
    # Some decoders take a row of positions for each axis of pictures, behind that of text if there
    # are four. Time, the first of three, stands still within a picture, and goes on behind it.
    positions = positions[0] if positions.ndim == 3 else positions
    steps = positions.diff(dim=-1)
    begins = steps < 0 if has_axes else steps != 1
    if mask is not None:
        is_real = mask[:, -positions.shape[-1] :].bool()
        begins = begins & is_real[:, 1:] & is_real[:, :-1]
    if not bool(begins.any()):
        return None
    row, column = begins.nonzero()[0].tolist()
    pair = positions[row, column : column + 2].tolist()
    return f"position_ids go from {pair[0]} to {pair[1]} at column {column + 1} of row {row}"


def _by_numbers(numbers: Any) -> str | None:
    if numbers is None or not bool(torch.as_tensor(numbers).diff(dim=-1).any()):
        return None
    return f"seq_idx with {len(torch.as_tensor(numbers).unique())} documents"


def _by_edges(edges: Any) -> str | None:
    return None if edges is None or len(edges) < 3 else f"cu_seq_lens_q with {len(edges)} edges"


def _by_lengths(lengths: Any) -> str | None:
    several = (row for row in lengths or () if len(row) > 1)
    found = next(several, None)
    return None if found is None else f"seq_lengths with a row of {len(found)} documents"
