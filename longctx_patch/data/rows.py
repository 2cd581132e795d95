"""Tokenised rows as users give them, and their checks."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.sequence.documents import Documents

_KEYS = frozenset(
    {"input_ids", "labels", "attention_mask", "seq_lengths", "seq_parents", "branches"}
)


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


def parse_row(row: Mapping[str, Any], number: int | str) -> Row:
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
    read = _flat if row.get("branches") is None else _with_branches
    found = read(row, number)
    _check_shared_labels(found, number)
    return found


def _flat(row: Mapping[str, Any], number: int | str) -> Row:
    """A row whose documents are one after another."""
    ids = _whole_numbers(row, "input_ids", number)
    labels = ids if row.get("labels") is None else _whole_numbers(row, "labels", number)
    if ids.ndim != 1 or labels.shape != ids.shape:
        raise ValueError(
            f"row {number}: input_ids {list(ids.shape)} and labels {list(labels.shape)} must be "
            "one-dimensional and equally long. Pass one row per example, unshifted labels."
        )
    given = row.get("attention_mask")
    mask = torch.ones_like(ids).bool() if given is None else torch.as_tensor(given).bool()
    real = int(mask.sum())
    if mask.shape != ids.shape or not mask[:real].all():
        raise ValueError(
            f"row {number}: attention_mask must be as long as input_ids and mark padding on the "
            "right only. Left padding shifts positions; pad on the right, or don't pad at all."
        )
    lengths = _lengths(row, number, real)
    parents = tuple(int(parent) for parent in row.get("seq_parents") or ())
    documents = Documents(lengths, real, parents)  # refuses parents that are no earlier documents
    return Row(ids[:real], labels[:real], lengths, parents if documents.has_branches else ())


def _with_branches(row: Mapping[str, Any], number: int | str) -> Row:
    """The prompt but for its last token; that one and a continuation, for each of them.

    So the last token of the prompt, which predicts another token in each branch, has one label.
    """
    given = row["branches"]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(
            f"row {number}: branches is {str(given)[:60]}: give a list of what goes on from the "
            "prompt, each a mapping with input_ids, or leave branches out."
        )
    alone = {name: value for name, value in row.items() if name != "branches"}
    prompt = parse_row(alone, number)
    if row.get("labels") is None:
        prompt = prompt._replace(labels=torch.full_like(prompt.ids, IGNORE_INDEX))
    names = [f"{number}, branch {place}" for place in range(len(given))]
    branches = list(map(parse_row, given, names))
    for part, name in zip([prompt, *branches], [number, *names], strict=True):
        if len(part.lengths) > 1 or (part is not prompt and not part.lengths):
            raise ValueError(
                f"row {name} has {len(part.lengths)} documents: a prompt is one, and so is each "
                "branch, of a token or more. Leave out empty branches; give several levels of "
                "them as seq_lengths and seq_parents."
            )
    shared = max(0, len(prompt.ids) - 1) if len(branches) > 1 else 0
    opening = prompt.ids[shared:], prompt.labels[shared:]
    parts = [Row(prompt.ids[:shared], prompt.labels[:shared], (shared,))] if shared else []
    for branch in branches:
        ids, labels = (torch.cat(pair) for pair in zip(opening, branch[:2], strict=True))
        parts.append(Row(ids, labels, (len(ids),)))
    return join_rows(parts)._replace(parents=(-1, *[0] * len(branches)) if shared else ())


def _check_shared_labels(row: Row, number: int | str) -> None:
    """Refuse labels that would count once here, and once for each branch in rows apart."""
    starts = accumulate(row.lengths, initial=0)
    for document, (start, parent) in enumerate(zip(starts, row.parents, strict=False)):
        shared = row.lengths[document] if document in row.parents else int(parent >= 0)
        labelled = (row.labels[start : start + shared] != IGNORE_INDEX).nonzero()
        if len(labelled):
            place = start + int(labelled[0])
            raise ValueError(
                f"row {number}: labels[{place}] is {int(row.labels[place])}, of a token that "
                "branches share, so that it would count once and not once for each of them. Make "
                f"it {IGNORE_INDEX} (a prompt without labels has no loss), or give rows without "
                "branches."
            )


def _whole_numbers(row: Mapping[str, Any], name: str, number: int | str) -> Tensor:
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


def _lengths(row: Mapping[str, Any], number: int | str, real: int) -> tuple[int, ...]:
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
