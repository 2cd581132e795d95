"""Placement of a packed row by whole documents: what ranks need of each other is next to nothing.

The longest first, each document goes to the rank with the fewest pairs of those that have room for
it. Long ones so spread over the ranks and short ones make up for what they differ by: the greedy
rule for jobs on machines (Graham 1969), with room for a share of the tokens on each machine.

The shortest, one for each rank, and what has found no room fill up what is left, rank by rank. One
document is cut between two ranks then, so each of them needs keys of one other.
"""

from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from longctx_patch.documents import Documents
from longctx_patch.layout import Interval, Layout, even_cuts

Ints = NDArray[np.int64]

GOAL = 0.002
"""Imbalance at which no more documents are swapped."""

MOST_LOOKED_AT = 64
"""Documents of a rank for a swap: the longest differ most in their pairs."""

SWAPS = 8
"""For each rank, at most: each row of a run is placed while GPUs may wait for it."""


def whole_documents(documents: Documents, num_ranks: int) -> Layout:
    """A layout in which shares of the tokens differ by one at most, and few documents are cut.

    Shares of pairs are as even as documents allow: a single one that is longer than the others
    together leaves ranks without work. Intervals are in the order of the tokens, and ranks in the
    order of their first.
    """
    edges, end = documents.edges, documents.edges[-1]
    runs = [Interval(edges[n], edges[n + 1]) for n in range(len(documents.lengths))]
    longest_first = sorted(runs, key=lambda run: (-run.size, run.start))
    longest_first, shortest = longest_first[:-num_ranks], longest_first[-num_ranks:]
    rest = [*shortest, Interval(end, documents.num_tokens)]
    bins = _Bins(even_cuts(documents.num_tokens, num_ranks))
    no_room = bins.take(longest_first, leave=sum(run.size for run in rest) // num_ranks)
    bins.even_out()
    bins.fill([*no_room, *rest])
    return Layout(tuple(sorted(map(_joined, bins.held))))


class _Bins:
    """What each rank has been given."""

    def __init__(self, shares: list[Interval]) -> None:
        self._room = _lengths(shares)
        self._pairs = np.zeros_like(self._room)
        self.held: list[list[Interval]] = [[] for _ in shares]
        """Runs of tokens, the longest documents first."""

    def take(self, documents: list[Interval], *, leave: int) -> list[Interval]:
        """Each goes whole to a rank; those for which none has room are returned. So many tokens of
        room are left on each rank."""
        room, no_room = (self._room - leave).tolist(), []
        ranks = [(0, rank) for rank in range(len(room))]  # a heap of (pairs, rank)
        for document in documents:
            full = []
            while ranks and room[ranks[0][1]] < document.size:
                full.append(heappop(ranks))
            if ranks:
                pairs, rank = ranks[0]
                heapreplace(ranks, (pairs + _pairs(document.size), rank))
                self.held[rank].append(document)
                room[rank] -= document.size
            else:
                no_room.append(document)
            for entry in full:
                heappush(ranks, entry)
        self._room = np.array(room, dtype=np.int64) + leave
        for pairs, rank in ranks:
            self._pairs[rank] = pairs
        return no_room

    def even_out(self) -> None:
        """Swap documents of the busiest rank, as long as that helps, for shorter ones of others.

        Each time the two are swapped that help most.
        """
        for _ in range(SWAPS * len(self.held)):
            if int(self._pairs.max()) <= (1 + GOAL) * float(self._pairs.mean()):
                return
            busiest = int(self._pairs.argmax())
            others = (n for n in range(len(self.held)) if n != busiest)
            best = min((self._best_swap(busiest, other) for other in others), default=None)
            if best is None or best.most_pairs >= self._pairs[busiest]:
                return
            self._swap(busiest, best)

    def _best_swap(self, busiest: int, other: int) -> "_Swap":
        mine, theirs = (_lengths(self.held[rank][:MOST_LOOKED_AT]) for rank in (busiest, other))
        longer = mine[:, None] - theirs
        relief = _pairs(mine)[:, None] - _pairs(theirs)
        after = np.maximum(self._pairs[busiest] - relief, self._pairs[other] + relief)
        after[(longer < 1) | (longer > self._room[other])] = np.iinfo(np.int64).max
        if not after.size:
            return _Swap(np.iinfo(np.int64).max, other, 0, 0)
        best = int(after.argmin())
        return _Swap(int(after.flat[best]), other, *divmod(best, len(theirs)))

    def _swap(self, busiest: int, swap: "_Swap") -> None:
        mine, theirs = self.held[busiest], self.held[swap.rank]
        given, taken = mine[swap.given], theirs[swap.taken]
        mine[swap.given], theirs[swap.taken] = taken, given
        for rank, sign in ((busiest, 1), (swap.rank, -1)):
            self._room[rank] += sign * (given.size - taken.size)
            self._pairs[rank] -= sign * (_pairs(given.size) - _pairs(taken.size))

    def fill(self, runs: list[Interval]) -> None:
        """Fill up one rank after the other."""
        rest = iter(runs)
        run = next(rest)
        for held, room in zip(self.held, self._room.tolist(), strict=True):
            while room:
                if not run.size:
                    run = next(rest)
                part = Interval(run.start, min(run.stop, run.start + room))
                held.append(part)
                run = Interval(part.stop, run.stop)
                room -= part.size


class _Swap(NamedTuple):
    most_pairs: int
    """Of the two ranks, afterwards."""
    rank: int
    given: int
    taken: int


N = TypeVar("N", int, Ints)


def _pairs(length: N) -> N:
    """Of a document."""
    return length * (length + 1) // 2


def _lengths(runs: list[Interval]) -> Ints:
    return np.array([run.size for run in runs], dtype=np.int64)


def _joined(runs: list[Interval]) -> tuple[Interval, ...]:
    """Runs in the order of their tokens, neighbours as one."""
    joined: list[Interval] = []
    for run in sorted(run for run in runs if run.size):
        if joined and joined[-1].stop == run.start:
            joined[-1] = Interval(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)
