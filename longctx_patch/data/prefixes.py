"""Rows of a batch that begin alike as one row, in which each beginning is computed once.

In a causal model what a token computes depends on the tokens before it alone. So the sequences of a
batch (its rows, or the documents of packed ones) make a tree: a document for each part that the
same sequences share, which goes on from the part before it (`Documents.parents`).

A token is shared by sequences that agree in it **and in the next token**, so that it has one label,
and the last token that they have in common opens each branch. The tree follows from ids and labels
alone, whatever is wanted of them, so all ranks find the same.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longctx_patch.data.rows import Row
from longctx_patch.data.whole_rows import SharedTokens, WholeRows
from longctx_patch.loss.law import IGNORE_INDEX

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


class Beginnings(NamedTuple):
    """Sequences of a batch, those that begin alike one after another."""

    sequences: "list[_Sequence]"
    shared: list[int]
    """How many tokens each one shares with the one before it, as it does with one before that."""
    shape: tuple[int, int]
    """`[B, L]` of the batch."""

    @classmethod
    def of(cls, whole: WholeRows) -> "Beginnings | None":
        """None where no two sequences begin alike."""
        sequences = list(_sequences(whole))
        if len({sequence.ids[:2].tobytes() for sequence in sequences}) == len(sequences):
            return None  # as most batches, in less time than a sort
        sequences.sort(key=lambda sequence: sequence.ids.astype(">i8").tobytes())
        shared = [0, *map(_shared, sequences, sequences[1:])]
        return cls(sequences, shared, (len(whole.rows), whole.length)) if any(shared) else None

    def saved(self, cost: Callable[[Ints], Ints | Floats]) -> float:
        """The share that is saved of what the sequences cost apart; `cost` of numbers of first
        tokens, `[N]` to `[N]`."""
        sizes = np.array([len(sequence.ids) for sequence in self.sequences])
        return float(cost(np.array(self.shared)).sum() / cost(sizes).sum())

    def join(self) -> tuple[Row, SharedTokens]:
        """The joined row, and where the rows' tokens are in it."""
        lengths, parents, places = _tree(self.sequences, self.shared)
        ids, labels = np.zeros((2, sum(lengths)), dtype=np.int64)
        labels[:] = IGNORE_INDEX
        columns, has_label = np.full(self.shape, -1), np.zeros(self.shape, dtype=np.bool_)
        for sequence, at in zip(self.sequences, places, strict=True):
            here = sequence.row, slice(sequence.column, sequence.column + len(at))
            has = sequence.labels != IGNORE_INDEX  # one row may want what another doesn't
            has[0] = False
            ids[at], labels[at[has]] = sequence.ids, sequence.labels[has]
            columns[here], has_label[here] = at, has
        row = Row(torch.from_numpy(ids), torch.from_numpy(labels), tuple(lengths), tuple(parents))
        return row, SharedTokens(torch.from_numpy(columns), torch.from_numpy(has_label[:, 1:]))


class _Sequence(NamedTuple):
    """A row, or a document of a packed one."""

    row: int
    column: int
    """Where it begins in the batch."""
    ids: Ints
    labels: Ints
    most: int
    """How many tokens may be shared: not the last, nor any from a label on that is not the next
    token, which other rows may want otherwise."""


def _sequences(whole: WholeRows) -> Iterator[_Sequence]:
    for number, (row, (first, _)) in enumerate(zip(whole.rows, whole.spans, strict=True)):
        ids, labels = row.ids.numpy(), row.labels.numpy()
        own = np.flatnonzero((labels != IGNORE_INDEX) & (labels != ids))
        for start, stop in pairwise(accumulate(row.lengths, initial=0)):
            later = own[np.searchsorted(own, start + 1) :]
            most = min([stop - 1, *(later[:1] - 1).tolist()]) - start
            yield _Sequence(number, first + start, ids[start:stop], labels[start:stop], most)


def _shared(one: _Sequence, other: _Sequence) -> int:
    """How many tokens two sequences share: they agree in the one after these, too."""
    size = min(one.most, other.most) + 1
    differ = one.ids[:size] != other.ids[:size]
    return max(0, (int(differ.argmax()) if differ.any() else size) - 1)


def _tree(
    sequences: Sequence[_Sequence], shared: Sequence[int]
) -> tuple[list[int], list[int], list[Ints]]:
    """(lengths and parents of the documents, the places of each sequence's tokens in the row)."""
    lengths: list[int] = []
    parents: list[int] = []
    places: list[Ints] = []
    path: list[tuple[int, int]] = []  # (where it ends, its number): documents of the last sequence
    filled = 0
    for number, sequence in enumerate(sequences):
        start, size = shared[number], len(sequence.ids)
        while path and path[-1][0] > start:
            path.pop()
        before = places[-1][:start] if start else np.empty(0, dtype=np.int64)
        places.append(np.concatenate([before, np.arange(filled, filled + size - start)]))
        filled += size - start
        for begin, end in pairwise([start, *_left_at(shared, number), size]):
            parents.append(path[-1][1] if path else -1)
            path.append((end, len(lengths)))
            lengths.append(end - begin)
    return lengths, parents, places


def _left_at(shared: Sequence[int], number: int) -> list[int]:
    """Where later sequences leave the part that a sequence has added, rising."""
    found, reached = set(), inf
    for count in shared[number + 1 :]:
        reached = min(reached, count)
        if reached <= shared[number]:
            break
        found.add(int(reached))
    return sorted(found)
