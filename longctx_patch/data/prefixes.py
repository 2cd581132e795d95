"""Rows of a batch that begin alike as one row, in which each beginning is computed once.

In a causal model what a token computes depends on the tokens before it alone. So the sequences of a
batch (its rows, or the documents of packed ones) make a tree: a document for each part that the
same sequences share, which goes on from the part before it (`Documents.parents`).

A token is shared by sequences that agree in it **and in the next token**, so that it has one label,
and the last token that they have in common opens each branch. The tree follows from ids and labels
alone, whatever is wanted of them, so all ranks find the same.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longctx_patch.data.rows import Row
from longctx_patch.data.whole_rows import SharedTokens, WholeRows
from longctx_patch.loss.law import IGNORE_INDEX

Ints = NDArray[np.int64]


def join_alike(whole: WholeRows) -> tuple[Row, SharedTokens] | None:
    """The joined row, and where the rows' tokens are in it; None where no two begin alike."""
    sequences = sorted(_sequences(whole), key=lambda sequence: sequence.key)
    lengths, parents, places = _tree(sequences)
    if all(parent < 0 for parent in parents):
        return None
    ids, labels = np.zeros((2, sum(lengths)), dtype=np.int64)
    labels[:] = IGNORE_INDEX
    columns = np.full((len(whole.rows), whole.length), -1)
    has_label = np.zeros((len(whole.rows), whole.length - 1), dtype=np.bool_)
    for (row, first, own_ids, own_labels), at in zip(sequences, places, strict=True):
        ids[at] = own_ids
        has = own_labels[1:] != IGNORE_INDEX  # one row may want what another doesn't
        labels[at[1:][has]] = own_labels[1:][has]
        columns[row, first : first + len(at)] = at
        has_label[row, first : first + len(at) - 1] = has
    joined = Row(torch.from_numpy(ids), torch.from_numpy(labels), tuple(lengths), tuple(parents))
    return joined, SharedTokens(torch.from_numpy(columns), torch.from_numpy(has_label))


class _Sequence(NamedTuple):
    """A row, or a document of a packed one."""

    row: int
    column: int
    """Where it begins in the batch."""
    ids: Ints
    labels: Ints

    @property
    def key(self) -> bytes:
        """Sorts sequences that begin alike next to each other: the ids, the highest byte first."""
        return self.ids.astype(">i8").tobytes()

    @property
    def most(self) -> int:
        """How many tokens may be shared: not the last, nor any from a label on that is not the next
        token, which other rows may want otherwise."""
        next_labels = self.labels[1:]
        is_own = (next_labels != IGNORE_INDEX) & (next_labels != self.ids[1:])
        return int(is_own.argmax()) if is_own.any() else len(self.ids) - 1


def _sequences(whole: WholeRows) -> Iterator[_Sequence]:
    for number, (row, (first, _)) in enumerate(zip(whole.rows, whole.spans, strict=True)):
        ids, labels = row.ids.numpy(), row.labels.numpy()
        for start, stop in pairwise(accumulate(row.lengths, initial=0)):
            yield _Sequence(number, first + start, ids[start:stop], labels[start:stop])


def _shared(one: _Sequence, other: _Sequence) -> int:
    """How many tokens two sequences share: they agree in the one after these, too."""
    size = min(one.most, other.most) + 1
    differ = one.ids[:size] != other.ids[:size]
    return max(0, (int(differ.argmax()) if differ.any() else size) - 1)


def _tree(sequences: Sequence[_Sequence]) -> tuple[list[int], list[int], list[Ints]]:
    """(lengths and parents of the documents, the places of each sequence's tokens in the row)."""
    shared = [0, *map(_shared, sequences, sequences[1:])]
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
