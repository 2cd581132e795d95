"""Tokenised rows as users give them, and their checks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.loss.law import IGNORE_INDEX

_KEYS = frozenset({"input_ids", "labels", "attention_mask", "seq_lengths"})


class Row(NamedTuple):
    """Documents one after another; int64 tensors of one dimension."""

    ids: Tensor
    labels: Tensor
    """Unshifted."""
    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """Which document each one goes on from: see `Documents`."""

    def next_labels(self) -> Tensor:
        """The label of each token: the token after it in its document, or the first of its
        branches, which are alike where they have a label."""
        shifted = torch.cat([self.labels[1:], self.labels.new_full((1,), IGNORE_INDEX)])
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        last = lengths.cumsum(0) - 1
        shifted[last] = IGNORE_INDEX
        if self.parents:
            parents, first = torch.tensor(self.parents), self.labels[last - lengths + 1]
            has_label = (parents >= 0) & (first != IGNORE_INDEX)
            shifted[last[parents[has_label]]] = first[has_label]
        return shifted[: len(self.ids)]


def join_rows(rows: Sequence[Row]) -> Row:
    lengths: list[int] = []
    parents: list[int] = []
    for row in rows:
        own = row.parents or (-1,) * len(row.lengths)
        parents += [parent + len(lengths) if parent >= 0 else -1 for parent in own]
        lengths += row.lengths
    return Row(
        torch.cat([row.ids for row in rows]),
        torch.cat([row.labels for row in rows]),
        tuple(lengths),
        tuple(parents) if any(row.parents for row in rows) else (),
    )


def parse_row(row: Mapping[str, Any], number: int) -> Row:
    """A row without its padding."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        has = (
            f"the keys {sorted(row)}" if isinstance(row, Mapping) else f"type {type(row).__name__}"
        )
        raise ValueError(
            f"row {number} has {has}: each row is a mapping with input_ids. Tokenise first."
        )
    if unknown := sorted(set(row) - _KEYS):
        masks = [name for name in unknown if name.endswith(("assistant_masks", "completion_mask"))]
        fix = (
            "Give the boundaries of packed documents as seq_lengths, a list of their lengths; "
            "positions and masks follow from it."
        )
        if any(name.startswith(("pixel_values", "image_", "video_")) for name in unknown):
            fix = (
                "Images are put in before rows are cut: give the model whole rows, as the "
                "processor makes them, with labels, and no collator that shards."
            )
        if masks:
            fix = (
                f"Make labels of {masks[0]}: the token ids where it is 1, and {IGNORE_INDEX} "
                "where it is 0, for tokens without loss."
            )
        raise ValueError(
            f"row {number} has {', '.join(unknown)}, which would be dropped: a row has "
            f"{', '.join(sorted(_KEYS))}. {fix}"
        )
    ids = _whole_numbers(row, "input_ids", number)
    labels = ids if row.get("labels") is None else _whole_numbers(row, "labels", number)
    if ids.ndim != 1 or labels.shape != ids.shape:
        raise ValueError(
            f"row {number}: input_ids {list(ids.shape)} and labels {list(labels.shape)} must be "
            "one-dimensional and equally long. Pass one row per example, unshifted labels."
        )
    if row.get("attention_mask") is None:
        return Row(ids, labels, _lengths(row, number, len(ids)))
    mask = torch.as_tensor(row["attention_mask"]).bool()
    real = int(mask.sum())
    if mask.shape != ids.shape or not mask[:real].all():
        raise ValueError(
            f"row {number}: attention_mask must be as long as input_ids and mark padding on the "
            "right only. Left padding shifts positions; pad on the right, or don't pad at all."
        )
    return Row(ids[:real], labels[:real], _lengths(row, number, real))


def _whole_numbers(row: Mapping[str, Any], name: str, number: int) -> Tensor:
    """The ids as int64: none is rounded. The model looks at values of labels, in its loss."""
    try:
        given = torch.as_tensor(row[name])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"row {number}: {name} is {str(row[name])[:60]} ({str(error).splitlines()[0]}): give "
            "a list of whole numbers, the ids of a tokenizer."
        ) from error
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(
            f"row {number}: {name} holds {given.dtype}, such as {given.flatten()[0].item()}: give "
            "whole numbers, the ids of a tokenizer."
        )
    found = given.to(torch.int64)
    if name == "input_ids" and (found < 0).any():
        place = int((found < 0).flatten().nonzero()[0])
        raise ValueError(
            f"row {number}: {name}[{place}] is {found.flatten()[place].item()}: an id is 0 or more."
        )
    return found


def _lengths(row: Mapping[str, Any], number: int, real: int) -> tuple[int, ...]:
    """Lengths of the documents of a row that has `real` tokens without padding."""
    given = row.get("seq_lengths")
    if given is None:
        return (real,) if real else ()
    lengths = tuple(int(length) for length in given)
    if any(length < 1 for length in lengths) or sum(lengths) != real:
        raise ValueError(
            f"row {number}: seq_lengths {list(lengths[:6])}{'...' if len(lengths) > 6 else ''} add "
            f"up to {sum(lengths)}, but the row has {real} tokens: every document has one or more, "
            "and together they fill the row. Mark padding on the right with attention_mask."
        )
    return lengths
