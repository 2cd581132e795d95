"""Placement of a packed row: every rank gets the same number of tokens and of allowed pairs.

Attention within documents costs a token as many pairs as it has keys, so runs of equal length cost
unequal time: a rank with a piece of a long document works while the others wait. Keys travel where
a document spans ranks, so `balanced` keeps documents whole, or cuts the longest alone, where no
rank is late for it. Otherwise it cuts the row into chunks, gives each rank consecutive ones, and
swaps as few as it takes.

Lengths that are a multiple of `balanced_multiple` give every rank the same number of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout, even_cuts
from longctx_patch.sequence.whole_documents import whole_documents

Ints = NDArray[np.int64]

LIMIT = 0.05
"""Imbalance at which documents stay whole, and no finer chunks are tried. Of many short documents
an exchange and the kernels that it brings take longer than this share of their attention."""

GOAL = 0.01
"""Imbalance at which no more chunks are swapped: what is left is not worth the bytes."""

MOST_CHUNKS = 64
"""Chunks of a rank at most: each may cost kernel calls of its own."""


def balanced(documents: Documents, num_ranks: int) -> Layout:
    """A layout of `num_ranks` ranks with equal shares of the tokens and of the allowed pairs.

    Shares of tokens differ by one at most, and not at all where `num_ranks` divides their number.
    Shares of pairs are within `LIMIT` of the mean: with whole documents, but for the few that fit
    nowhere, where that can be; else at the fewest chunks for which such a layout was found. Where
    none was (hardly any tokens a rank), the best that was found is returned. A row of one document
    is placed as `zigzag` does, by less than 100 ranks exactly so.

    Each rank's intervals are in the order of the tokens, and ranks in the order of their first. The
    result depends on the arguments alone, so every rank finds the same. For Ulysses, split it
    (`Layout.split_each`): those ranks share the pairs of their ring rank by heads.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a layout has 1 rank or more.")
    for most in _mosts(documents, num_ranks):
        whole = whole_documents(documents, num_ranks, most)
        if imbalance(documents, whole) <= LIMIT:
            return whole
    best, least = None, np.inf
    for layout in _candidates(documents, num_ranks):
        found = imbalance(documents, layout)
        if found < least:
            best, least = layout, found
        if least <= LIMIT:
            break
    assert best is not None, "consecutive runs are always a candidate"
    return best


def balanced_multiple(*, ring: int, ulysses: int = 1) -> int:
    """Lengths that are a multiple of this give every rank of (ring x Ulysses) as many tokens.

    The number of ranks is enough, half of what zigzag needs: chunks get their lengths once it is
    known whose they are, such that each rank's add up to its share (see `_placed`).
    """
    return ring * ulysses


def imbalance(documents: Documents, layout: Layout) -> float:
    """How far the rank with the most allowed pairs is above the mean: 0.05 is 5 % above.

    The queries decide where a pair belongs. In closed form, for layouts of consecutive tokens.
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
    areas = _Areas.of(documents)
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, ranks, areas.before(stops) - areas.before(starts))
    return _excess(loads)


def _mosts(documents: Documents, num_ranks: int) -> list[float]:
    """Pairs of a document that stays whole, as a multiple of a rank's share: what is worth trying.
    A row of one document is zigzag's."""
    pairs = [length * (length + 1) // 2 for length in documents.lengths]
    if len(pairs) < 2:
        return []
    longest = max(pairs) * num_ranks / sum(pairs)
    return [1.0 + LIMIT, 1.0, 0.5] if longest <= 1 + LIMIT else [1.0, 0.5]


@dataclass(frozen=True)
class _Areas:
    """Allowed pairs of a row's first tokens."""

    edges: Ints
    """`[documents + 1]`: where each begins, and where the last one ends."""
    finished: Ints
    """`[documents + 1]`: pairs of all documents before."""

    @classmethod
    def of(cls, documents: Documents) -> "_Areas":
        edges = np.array(documents.edges, dtype=np.int64)
        lengths = np.diff(edges)
        finished = np.zeros_like(edges)
        np.cumsum(lengths * (lengths + 1) // 2, out=finished[1:])
        return cls(edges, finished)

    def before(self, tokens: Ints) -> Ints:
        """Pairs of the queries before each of `tokens`: query `t` of a document has `t + 1`."""
        tokens = np.minimum(tokens, self.edges[-1])  # padding has none
        document = np.searchsorted(self.edges, tokens, side="right") - 1
        offset = tokens - self.edges[document]
        return self.finished[document] + offset * (offset + 1) // 2


def _excess(loads: Ints) -> float:
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total - 1 if total else 0.0


def _candidates(documents: Documents, num_ranks: int) -> Iterator[Layout]:
    """Layouts of 1, 2, 4, ... chunks a rank."""
    areas, per_rank = _Areas.of(documents), 1
    while True:
        num_chunks = per_rank * num_ranks
        edges = np.arange(num_chunks + 1) * documents.num_tokens // num_chunks
        rank_of = _swapped(np.diff(areas.before(edges)), num_ranks)
        yield _placed(rank_of, num_ranks, documents.num_tokens)
        per_rank *= 2
        if per_rank > MOST_CHUNKS or per_rank * num_ranks > documents.num_tokens:
            return


def _swapped(areas: Ints, num_ranks: int) -> Ints:
    """The rank of each chunk: consecutive ones, then swaps of the worst rank until none helps.

    Each time the two chunks are swapped that help most. Ranks keep their number of chunks, and both
    end up below what the worst one had, so the sum of squared loads falls and no assignment comes
    twice. Neighbours that nobody had to swap stay together, and most of their keys at home.
    """
    rank_of = np.repeat(np.arange(num_ranks), len(areas) // num_ranks)
    loads = areas.reshape(num_ranks, -1).sum(axis=1)
    while _excess(loads) > GOAL:
        worst = int(loads.argmax())
        mine, others = np.flatnonzero(rank_of == worst), np.flatnonzero(rank_of != worst)
        mine = mine[np.argsort(areas[mine], kind="stable")]
        # Both ranks end up equal where my chunk is larger by half of what the ranks differ.
        wanted = areas[others] + (loads[worst] - loads[rank_of[others]]) // 2
        between = (areas[mine][1:] + areas[mine][:-1]) // 2
        nearest = mine[np.searchsorted(between, wanted)]
        relief = areas[nearest] - areas[others]
        after = np.maximum(loads[worst] - relief, loads[rank_of[others]] + relief)
        best = int(after.argmin())
        if after[best] >= loads[worst]:
            break
        given, taken = nearest[best], others[best]
        partner = rank_of[taken]
        rank_of[given], rank_of[taken] = partner, worst
        loads[worst] -= relief[best]
        loads[partner] += relief[best]
    return rank_of


def _placed(rank_of: Ints, num_ranks: int, num_tokens: int) -> Layout:
    """The layout in which the chunks, in the order of the tokens, belong to these ranks.

    Chunks get their lengths here: those of a rank add up to its even share of the tokens, whatever
    the number of chunks. Ranks round at different chunks, so that the roundings cancel and edges
    stay within a few tokens of even ones.
    """
    sizes = np.empty_like(rank_of)
    for rank, share in enumerate(even_cuts(num_tokens, num_ranks)):
        chunks = np.flatnonzero(rank_of == rank)
        ends = np.arange(len(chunks) + 1) * share.size * num_ranks + rank * len(chunks)
        sizes[chunks] = np.diff(ends // (len(chunks) * num_ranks))
    sizes, rank_of = sizes[sizes > 0], rank_of[sizes > 0]
    first_of_run = np.flatnonzero(np.diff(rank_of, prepend=-1))
    edges = np.append((np.cumsum(sizes) - sizes)[first_of_run], num_tokens).tolist()
    intervals: list[list[Interval]] = [[] for _ in range(num_ranks)]
    for rank, (start, stop) in zip(rank_of[first_of_run].tolist(), pairwise(edges), strict=True):
        intervals[rank].append(Interval(start, stop))
    return Layout(tuple(sorted(map(tuple, intervals))))
