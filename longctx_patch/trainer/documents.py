"""The documents of a trainer's batch: the tokens of its rows, as collators and TRL make them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GENERATED = "prompt", "completion"
"""Parts of a row that TRL's trainers generate, each with `_ids` and `_mask`."""


def documents_of(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tokens of each document, without padding; nothing of a batch without rows.

    Args:
        batch: `input_ids` `[B, L]`, with `attention_mask` where rows are padded, and `position_ids`
            or `seq_lengths` where several documents were joined; or `prompt_ids` and
            `completion_ids`, with their masks.
    """
    if all(_is_rows(batch.get(f"{part}_ids")) for part in GENERATED):
        parts = [[*_without_padding(batch, f"{part}_ids", f"{part}_mask")] for part in GENERATED]
        yield from (torch.cat(both) for both in zip(*parts, strict=True))
        return
    if not _is_rows(batch.get("input_ids")):
        return
    rows = [*_without_padding(batch, "input_ids", "attention_mask")]
    for row, lengths in zip(rows, _lengths(batch, rows), strict=True):
        yield from row.split(lengths) if sum(lengths) == len(row) else (row,)


def _is_rows(ids: Any) -> bool:
    return isinstance(ids, Tensor) and ids.ndim == 2


def _without_padding(batch: Mapping[str, Any], ids: str, mask: str) -> Iterator[Tensor]:
    return (row[real] for row, real in zip(batch[ids], _real(batch, ids, mask), strict=True))


def _real(batch: Mapping[str, Any], ids: str, mask: str) -> Tensor:
    """`[B, L]` bool: which columns are no padding."""
    given = batch.get(mask)
    if isinstance(given, Tensor) and given.shape == batch[ids].shape:
        return given.bool()
    return torch.ones_like(batch[ids], dtype=torch.bool)


def _lengths(batch: Mapping[str, Any], rows: Sequence[Tensor]) -> list[list[int]]:
    """Of the documents of each row."""
    if batch.get("seq_lengths") is not None:
        given = [[int(length) for length in row if int(length)] for row in batch["seq_lengths"]]
        return given if len(given) == len(rows) else [[len(row)] for row in rows]
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != batch["input_ids"].shape:
        return [[len(row)] for row in rows]
    counted = {"position_ids": positions, "attention_mask": batch.get("attention_mask")}
    return [_runs(row) for row in _without_padding(counted, "position_ids", "attention_mask")]


def _runs(positions: Tensor) -> list[int]:
    starts = (positions == 0).nonzero().flatten().tolist()
    edges = [0, *(start for start in starts if start), len(positions)]
    return [stop - start for start, stop in pairwise(edges)]
