"""Whole rows of four documents as trainers batch them, and where each document lies in them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.hf.features import VOCABULARY

LENGTHS = (23, 9, 16, 30)


class Batch(NamedTuple):
    given: dict[str, Any]
    places: list[tuple[int, int]]
    """(row, first column) of each document."""


def document(number: int) -> tuple[Tensor, Tensor]:
    """Ids and labels; the prompt has no labels."""
    ids = (torch.arange(LENGTHS[number]) * (7 + number) + number * number) % VOCABULARY
    labels = ids.clone()
    labels[: 3 + number] = -100
    labels[-2] = -100
    return ids, labels


DOCUMENTS = [document(number) for number in range(len(LENGTHS))]


def padded(side: str) -> Batch:
    longest = max(LENGTHS)
    starts = [longest - length if side == "left" else 0 for length in LENGTHS]

    def rows(parts: list[Tensor], value: int) -> Tensor:
        filled = [
            pad(x, (start, longest - len(x) - start), value=value)
            for x, start in zip(parts, starts, strict=True)
        ]
        return torch.stack(filled)

    ids, labels = ([doc[kind] for doc in DOCUMENTS] for kind in (0, 1))
    given = {
        "input_ids": rows(ids, 3),
        "labels": rows(labels, -100),
        "attention_mask": rows([torch.ones_like(x) for x in ids], 0),
    }
    return Batch(given, list(enumerate(starts)))


def packed(num_rows: int) -> Batch:
    """All documents in one row or two; a shorter row is filled with tokens of their own."""
    each = len(LENGTHS) // num_rows
    packs = [LENGTHS[start : start + each] for start in range(0, len(LENGTHS), each)]

    def rows(parts: list[Tensor], value: int) -> Tensor:
        joined = [torch.cat(parts[n * each : (n + 1) * each]) for n in range(num_rows)]
        longest = max(map(len, joined))
        return torch.stack([pad(x, (0, longest - len(x)), value=value) for x in joined])

    ids, labels = ([doc[kind] for doc in DOCUMENTS] for kind in (0, 1))
    given = {
        "input_ids": rows(ids, 3),
        "labels": rows(labels, -100),
        "position_ids": rows([torch.arange(n) for n in LENGTHS], 0),
    }
    places = [(row, sum(pack[:n])) for row, pack in enumerate(packs) for n in range(each)]
    return Batch(given, places)


BATCHES = {"right": padded("right"), "left": padded("left"), "packed": packed(2)}
ONE_ROW = packed(1)


def of_documents(values: Tensor, batch: Batch) -> list[Tensor]:
    """Those of each document, of `[B, L - 1]` values."""
    return [
        values[row, first : first + length - 1]
        for (row, first), length in zip(batch.places, LENGTHS, strict=True)
    ]
