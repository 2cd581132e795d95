"""Placement of a packed row: every rank gets the same number of tokens and of allowed pairs.

Attention within documents costs a token as many pairs as it has keys, so runs of equal length cost
unequal time: a rank with a piece of a long document works while the others wait. Keys travel where
a document spans ranks, so `balanced` keeps documents whole, or cuts only the longest, if that
leaves ranks balanced (`whole_documents`). Otherwise it cuts the row into chunks
(`chunked_layouts`), of which ranks hold consecutive ones, and swap as few as it takes.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout, even_cuts
from longctx_patch.sequence.pairs import (
    GOAL,
    LIMIT,
    Ints,
    RowPairs,
    excess,
    imbalance,
    pairs_of,
)
from longctx_patch.sequence.whole_documents import whole_documents

MOST_CHUNKS = 64
"""The most chunks of a rank: each may cost kernel calls of its own."""


def balanced(documents: Documents, num_ranks: int) -> Layout:
    """A layout of `num_ranks` ranks with equal shares of the tokens and of the allowed pairs.

    Shares of tokens differ by one at most, and not at all where `num_ranks` divides their number.
    Shares of pairs are within `LIMIT` of the mean. If possible, documents stay whole, except the
    few that fit nowhere; otherwise the layout has the fewest chunks for which one was found. Where
    none was found (ranks hold hardly any tokens), the best candidate is returned. A row of one
    document is placed as `zigzag` does, exactly so on fewer than 100 ranks.

    Each rank's intervals are in the order of the tokens, and ranks in the order of their first
    tokens. The result depends on the arguments alone, so every rank finds the same. For Ulysses,
    split the layout (`Layout.split_each`): Ulysses ranks share their ring rank's pairs by heads.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a layout has 1 rank or more.")
    for share in _shares_of_a_whole_document(documents, num_ranks):
        whole = whole_documents(documents, num_ranks, share)
        if imbalance(documents, whole) <= LIMIT:
            return whole
    candidates = []
    for layout in chunked_layouts(documents, num_ranks):
        candidates.append((imbalance(documents, layout), layout))
        if candidates[-1][0] <= LIMIT:
            break
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _shares_of_a_whole_document(documents: Documents, num_ranks: int) -> list[float]:
    """Limits to try on the pairs of a document that stays whole, as multiples of a rank's share; []
    for a row of one document, which zigzag places."""
    pairs = list(map(pairs_of, documents.lengths, documents.begins))
    if len(pairs) < 2:
        return []
    longest = max(pairs) * num_ranks / sum(pairs)
    return [1.0 + LIMIT, 1.0, 0.5] if longest <= 1 + LIMIT else [1.0, 0.5]


def chunked_layouts(documents: Documents, num_ranks: int) -> Iterator[Layout]:
    """Layouts of 1, 2, 4, ... chunks a rank."""
    row, per_rank = RowPairs.of(documents), 1
    while True:
        num_chunks = per_rank * num_ranks
        edges = np.arange(num_chunks + 1) * documents.num_tokens // num_chunks
        rank_of = _swapped(np.diff(row.before(edges)), num_ranks)
        yield _placed(rank_of, num_ranks, documents.num_tokens)
        per_rank *= 2
        if per_rank > MOST_CHUNKS or per_rank * num_ranks > documents.num_tokens:
            return


def _swapped(pairs: Ints, num_ranks: int) -> Ints:
    """The rank of each chunk, given the chunks' pairs: ranks take consecutive chunks, then the rank
    with the most pairs swaps chunks until no swap helps.

    Each swap is the one that helps most. Ranks keep their number of chunks, and both ranks end up
    below what the worst one had, so the sum of squared loads falls and no assignment comes twice.
    Neighbouring chunks that were not swapped stay on one rank, and so do most of their keys.
    """
    rank_of = np.repeat(np.arange(num_ranks), len(pairs) // num_ranks)
    loads = pairs.reshape(num_ranks, -1).sum(axis=1)
    while excess(loads) > GOAL:
        worst = int(loads.argmax())
        mine, others = np.flatnonzero(rank_of == worst), np.flatnonzero(rank_of != worst)
        mine = mine[np.argsort(pairs[mine], kind="stable")]
        # Both ranks end up equal if the chunk given is larger by half of their difference.
        wanted = pairs[others] + (loads[worst] - loads[rank_of[others]]) // 2
        between = (pairs[mine][1:] + pairs[mine][:-1]) // 2
        nearest = mine[np.searchsorted(between, wanted)]
        relief = pairs[nearest] - pairs[others]
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
