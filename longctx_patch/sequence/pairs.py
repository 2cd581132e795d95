"""Allowed pairs (query, key) of a packed row, and how evenly the ranks of a layout share them.

A layout's imbalance is how far the rank with the most pairs is above the mean: 0.05 is 5 % above.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout

Ints = NDArray[np.int64]
Number = TypeVar("Number", int, Ints)

LIMIT = 0.05
"""Imbalance at which a layout is taken. An exchange, and the kernel calls that it brings, take
longer than this share of the attention over many short documents."""

GOAL = 0.01
"""Imbalance at which nothing more is tried: more even shares would not repay their bytes."""


def pairs_of(length: Number, begins: Number | int = 0) -> Number:
    """Allowed pairs of a document's first `length` tokens; it goes on from `begins` others."""
    return length * (length + 1) // 2 + length * begins


def excess(loads: Ints) -> float:
    """The excess of the largest of the ranks' loads `[ranks]` over their mean; 0 if all are 0."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total - 1 if total else 0.0


def imbalance(documents: Documents, layout: Layout) -> float:
    """The excess of the rank with the most allowed pairs over the mean: 0.05 is 5 % above.

    A pair belongs to the rank that holds its query. Computed in closed form, for layouts of
    consecutive tokens.
    """
    if layout.num_tokens != documents.num_tokens:
        raise ValueError(
            f"the layout places {layout.num_tokens} tokens, the documents have "
            f"{documents.num_tokens}. Build the layout for this length."
        )
    held = [(rank, *i) for rank, intervals in enumerate(layout.intervals) for i in intervals]
    if any(step != 1 for _, _, _, step in held):
        raise ValueError("a striped layout: pairs are counted for runs of tokens. Use another one.")
    ranks, starts, stops, _ = np.array(held, dtype=np.int64).reshape(-1, 4).T
    row = RowPairs.of(documents)
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, ranks, row.before(stops) - row.before(starts))
    return excess(loads)


@dataclass(frozen=True)
class RowPairs:
    """Allowed pairs of a row's queries, counted from the row's beginning."""

    edges: Ints
    """`[documents + 1]`: where each document begins, and where the last one ends."""
    begins: Ints
    """`[documents + 1]`: tokens that each document goes on from."""
    finished: Ints
    """`[documents + 1]`: pairs of all documents before each edge."""

    @classmethod
    def of(cls, documents: Documents) -> "RowPairs":
        edges = np.array(documents.edges, dtype=np.int64)
        begins = np.array([*documents.begins, 0], dtype=np.int64)
        finished = np.zeros_like(edges)
        np.cumsum(pairs_of(np.diff(edges), begins[:-1]), out=finished[1:])
        return cls(edges, begins, finished)

    def before(self, tokens: Ints) -> Ints:
        """Pairs of the queries before each of `tokens`: query `t` of a document has `t + 1`, and
        those that it goes on from."""
        tokens = np.minimum(tokens, self.edges[-1])  # padding has none
        document = np.searchsorted(self.edges, tokens, side="right") - 1
        offset = tokens - self.edges[document]
        return self.finished[document] + pairs_of(offset, self.begins[document])
