"""Refuses whole rows that transformers reads in another way than their documents are meant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from longctx_patch.loss.law import IGNORE_INDEX

Lengths = tuple[int, ...]
"""The lengths of a row's documents, in tokens."""
Span = tuple[int, int]
"""(first, one past the last) column of a row's tokens."""


LENGTHS = ("seq_lengths", "seq_idx", "cu_seq_lens_q")
"""Arguments that say where documents are, beside position_ids."""


@dataclass(frozen=True)
class StockModel:
    """Describes what a model does with rows before it is patched."""

    sees_absolute_positions: bool = False
    """Whether it computes something else if the first position of a document is not 0."""
    finds_documents: bool = True
    """Whether positions that start anew keep documents apart."""
    counts_rows_from: int | None = None
    """In rows of so many tokens and more it counts something from the start of the row, and not of
    a document; None: in none."""
    takes_lengths: bool = False
    """Whether its attention reads `cu_seq_lens_q`."""


def check_read_alike(
    given: Mapping[str, Any], spans: Sequence[Span], lengths: Sequence[Lengths], stock: StockModel
) -> None:
    """Refuse rows whose documents transformers would see otherwise.

    Args:
        given: arguments of a forward pass.
        spans, lengths: where each row's tokens are, and how long its documents.
    """
    is_packed, positions = any(len(row) > 1 for row in lengths), given.get("position_ids")
    check_lengths_alone(given, stock)
    if is_packed and given.get("attention_mask") is not None:
        raise ValueError(
            "packed rows with an attention_mask: transformers looks for documents only where there "
            "is no mask, and would let them see each other. Leave attention_mask out; padding of "
            "packed rows has the position 0 and no label."
        )
    if is_packed and given.get("use_cache"):
        raise ValueError(
            "packed rows with use_cache=True: transformers doesn't look for documents where there "
            "is a cache, and would let them see each other. Use use_cache=False."
        )
    if is_packed and not stock.finds_documents:
        raise ValueError(
            "packed rows: transformers' own model of this type doesn't look for documents, and "
            "would let them see each other. Train on one document a row; or, without transformers' "
            "numbers to compare with, on batches of SequenceShardCollator with seq_lengths."
        )
    begins_late = is_packed or any(start for start, _ in spans)
    if begins_late and stock.counts_rows_from is not None:
        _check_counts(stock.counts_rows_from, spans)
    if begins_late and stock.sees_absolute_positions:
        _check_positions(positions, spans)


def check_lengths_alone(given: Mapping[str, Any], stock: StockModel) -> None:
    """Refuse lengths without positions, which transformers' attention does not read."""
    if given.get("position_ids") is not None:
        return
    silent = [name for name in ("seq_lengths", "seq_idx") if given.get(name) is not None]
    if given.get("cu_seq_lens_q") is not None and not stock.takes_lengths:
        silent.append("cu_seq_lens_q")
    if silent:
        raise ValueError(
            f"{silent[0]} without position_ids: this model's attention in transformers does not "
            "read it, and would let documents see each other. Give position_ids that count from 0 "
            "in each document."
        )


def _check_counts(counted_from: int, spans: Sequence[Span]) -> None:
    """Refuse rows in which transformers would count chunks or a temperature over documents."""
    longest = max(stop for _, stop in spans)
    if longest >= counted_from:
        raise ValueError(
            f"a document that begins in the middle of a row of {longest} tokens: transformers' own "
            "model of this type counts the chunks of its attention, or the temperature, from the "
            f"start of the row, which matters from {counted_from} tokens on. Train on one document "
            "a row, padded on the right; or, without transformers' numbers to compare with, on "
            "batches of SequenceShardCollator with seq_lengths."
        )


def _check_positions(positions: Tensor | None, spans: Sequence[Span]) -> None:
    """Refuse documents that would begin at another position than 0 in transformers."""
    if positions is not None:
        rows = positions.cpu().expand(len(spans), -1)
        firsts = [row[start] for row, (start, stop) in zip(rows, spans, strict=True) if stop]
        if not any(map(bool, firsts)):
            return
    raise ValueError(
        "a document that begins in the middle of a row, without position_ids that count from 0 "
        "there: this model's attention depends on the positions themselves, not on their "
        "distances alone. Give position_ids, or pad on the right."
    )


def check_labels(labels: Tensor, spans: Sequence[Span], lengths: Sequence[Lengths]) -> None:
    """Refuse labels that transformers would learn from padding or from another document.

    It shifts labels over the whole batch, whatever the rows hold.
    """
    learns = labels != IGNORE_INDEX
    for number, ((start, stop), documents) in enumerate(zip(spans, lengths, strict=True)):
        if bool(learns[number, :start].any() or learns[number, stop:].any()):
            raise ValueError(
                f"row {number} has labels on padding: give {IGNORE_INDEX} there, as collators do "
                "that know the padding token."
            )
        firsts = [start, *accumulate(documents, initial=start)][1:-1]
        if bool(learns[number, [column for column in firsts if column]].any()):
            raise ValueError(
                f"row {number} has a label on the first token of a document, which transformers "
                "would learn from the padding or the document before it. Give it the label "
                f"{IGNORE_INDEX}, or pad on the right (tokenizer.padding_side='right')."
            )
