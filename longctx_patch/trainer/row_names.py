"""Which rows of a dataset a batch has, found by their tokens: a trainer's sampler doesn't say."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 2**26
"""Of the dataset that are read in search of a batch's rows."""


def rows_of_batch(batch: Mapping[str, Any], dataset: Any) -> str:
    """The numbers of a batch's rows in the trainer's dataset, from 0, in words; empty where rows
    can't be told, as in a stream, or in a dataset without `input_ids`.

    Args:
        batch: `input_ids` `[B, L]`, with `attention_mask` where rows are padded, and `position_ids`
            where several were joined.
    """
    wanted = [part.tolist() for part in _parts(batch) if len(part)]
    if not wanted or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return ""
    found: dict[int, int] = {}
    left = MOST_TOKENS
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return ""
        ids = torch.as_tensor(row["input_ids"]).tolist()
        left -= len(ids)
        # A collator may have cut a row at its end.
        alike = (n for n, tokens in enumerate(wanted) if tokens == ids[: len(tokens)])
        found |= {number: index for number in alike if number not in found}
        if len(found) == len(wanted) or left < 0:
            break
    if not found:
        return ""
    numbers = ", ".join(str(found.get(number, "?")) for number in range(len(wanted)))
    return f"{numbers} of train_dataset"


def _parts(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tokens of each row of the dataset in the batch, without padding."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    for number, row in enumerate(ids):
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            yield row[mask[number].bool()]
        elif isinstance(positions, Tensor) and positions.shape == ids.shape:
            starts = (positions[number] == 0).nonzero().flatten().tolist()
            yield from row.split(_lengths(starts, len(row)))
        else:
            yield row


def _lengths(starts: Sequence[int], end: int) -> list[int]:
    edges = [0, *(start for start in starts if start), end]
    return [stop - start for start, stop in pairwise(edges)]
