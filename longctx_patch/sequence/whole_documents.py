"""Placement of a packed row by whole documents: what ranks need of each other is next to nothing.

The longest first, each document goes to the rank with the fewest pairs of those that have room for
it. Long ones so spread over the ranks and short ones make up for what they differ by: the greedy
rule for jobs on machines (Graham 1969), with room for a share of the tokens on each machine.

The shortest fill up each rank's share to the last token: of a few of them some add up to it (a
subset sum, by dynamic programming over bits). Where none do, what is left is cut.

A document that keeps a rank busy for longer than the others can be cut beforehand, into pieces of
equal pairs that are placed like documents: it travels, the others don't.

Each rank works it out by itself, so all is in whole numbers: sums of others are rounded as the CPU
likes.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from math import ceil, inf, isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout, Rows, even_cuts

Ints = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""More pairs than there are."""

GOAL = 0.002
"""Imbalance at which no more documents are swapped."""

FILLERS = (8, 4, 16)
"""Short documents for each rank, of all up to a half: some of so many add up to most numbers. Tried
in this order."""

GOOD, OF_A_CUT = 0.01, 0.03
"""Imbalance at which no others are tried, and what it may be to leave no document cut: an exchange
and the kernels that it brings take about as long."""

MOST_LOOKED_AT = 64
"""Documents of a rank for a swap: the longest differ most in their pairs."""

SWAPS, PARTNERS = 8, 4
"""For each rank, and ranks that each is looked for on, at most: GPUs may wait for a placement."""


def whole_documents(documents: Documents, num_ranks: int, most: float = inf) -> Layout:
    """A layout in which shares of the tokens differ by one at most, and few documents are cut:
    mostly none, where there are some for each rank and their lengths have no common divisor; but
    those that have more pairs than `most` of a rank's share.

    Shares of pairs are as even as documents allow: a single one that is longer than the others
    together leaves ranks without work. Intervals are in the order of the tokens, and ranks in the
    order of their first.
    """
    pieces = _pieces(documents, most * sum(map(_pairs, documents.lengths)) / num_ranks)
    padding = Interval(documents.edges[-1], documents.num_tokens)
    best = _placed(pieces, padding, num_ranks, FILLERS[0])
    for fillers in FILLERS[1:]:
        if best.cost <= GOOD:
            break
        other = _placed(pieces, padding, num_ranks, fillers)
        best = min(best, other, key=lambda bins: bins.cost)
    return Layout(tuple(sorted(Rows.of(piece.run for piece in held).runs for held in best.held)))


class _Piece(NamedTuple):
    """A document, or a part of one."""

    run: Interval
    """Its tokens."""
    pairs: int

    @property
    def size(self) -> int:
        return self.run.size


def _pieces(documents: Documents, most_pairs: float) -> list[_Piece]:
    """Documents, and of those with more pairs parts that have equally many."""
    found = []
    for start, length in zip(documents.edges, documents.lengths, strict=False):
        count = max(1, ceil(_pairs(length) / most_pairs)) if most_pairs else 1
        # The first n tokens have about n * n / 2 pairs.
        edges = [isqrt(length * length * part // count) for part in range(count + 1)]
        found += [
            _Piece(Interval(start + a, start + b), _pairs(b) - _pairs(a))
            for a, b in pairwise(edges)
            if a < b
        ]
    return found


def _placed(pieces: list[_Piece], padding: Interval, num_ranks: int, fillers: int) -> "_Bins":
    longest_first = sorted(pieces, key=lambda piece: (-piece.pairs, piece.run))
    num_long = len(pieces) - min(fillers * num_ranks, len(pieces) // 2)
    long, short = longest_first[:num_long], longest_first[num_long:]
    num_left = sum(piece.size for piece in short) + padding.size
    pairs_of_left = sum(piece.pairs for piece in short) // max(1, num_left)
    bins = _Bins(even_cuts(padding.stop, num_ranks), pairs_of_left)
    no_room = bins.take(long, leave=num_left // num_ranks)
    bins.even_out()
    bins.cut(bins.fill([*no_room, *short]), padding)
    return bins


class _Bins:
    """What each rank has been given."""

    def __init__(self, shares: list[Interval], pairs_of_left: int) -> None:
        """`pairs_of_left`: of a token that fills up what room is left in the end."""
        self._pairs_of_left = pairs_of_left
        self._room = np.array([share.size for share in shares], dtype=np.int64)
        self._pairs = pairs_of_left * self._room
        """With those of what will fill the room."""
        self.held: list[list[_Piece]] = [[] for _ in shares]
        """The longest first."""
        self.cost = inf
        """Imbalance, and that of cuts, of what is full."""

    def take(self, documents: list[_Piece], *, leave: int) -> list[_Piece]:
        """Each goes whole to a rank; those for which none has room are returned. So many tokens of
        room are left on each rank."""
        room, no_room = (self._room - leave).tolist(), []
        ranks = [(pairs, rank) for rank, pairs in enumerate(self._pairs.tolist())]
        heapify(ranks)
        for document in documents:
            full = []
            while ranks and room[ranks[0][1]] < document.size:
                full.append(heappop(ranks))
            if ranks:
                pairs, rank = ranks[0]
                heapreplace(ranks, (pairs + self._more_pairs(document), rank))
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
            if _imbalance(self._pairs) <= GOAL:
                return
            busiest = int(self._pairs.argmax())
            by_pairs = self._pairs.argsort(kind="stable").tolist()
            others = [rank for rank in by_pairs if rank != busiest][:PARTNERS]
            best = min((self._best_swap(busiest, other) for other in others), default=None)
            if best is None or best.most_pairs >= self._pairs[busiest]:
                return
            self._swap(busiest, best)

    def _best_swap(self, busiest: int, other: int) -> "_Swap":
        mine, theirs = (self.held[rank][:MOST_LOOKED_AT] for rank in (busiest, other))
        if not (mine and theirs):
            return _Swap(NEVER, other, 0, 0)
        longer = _numbers([piece.size for piece in mine], [piece.size for piece in theirs])
        relief = _numbers(map(self._more_pairs, mine), map(self._more_pairs, theirs))
        after = np.maximum(self._pairs[busiest] - relief, self._pairs[other] + relief)
        after[(longer > self._room[other]) | (-longer > self._room[busiest])] = NEVER
        best = int(after.argmin())
        return _Swap(int(after.flat[best]), other, *divmod(best, len(theirs)))

    def _swap(self, busiest: int, swap: "_Swap") -> None:
        mine, theirs = self.held[busiest], self.held[swap.rank]
        given, taken = mine[swap.given], theirs[swap.taken]
        mine[swap.given], theirs[swap.taken] = taken, given
        for rank, sign in ((busiest, 1), (swap.rank, -1)):
            self._room[rank] += sign * (given.size - taken.size)
            self._pairs[rank] -= sign * (self._more_pairs(given) - self._more_pairs(taken))

    def _more_pairs(self, piece: _Piece) -> int:
        """What a rank gets by it, in place of what would fill its room."""
        return piece.pairs - self._pairs_of_left * piece.size

    def fill(self, documents: list[_Piece]) -> list[_Piece]:
        """Those that add up to as much of a rank's room as can be, rank by rank; what is left."""
        left = documents
        for rank, room in enumerate(self._room.tolist()):
            chosen, left = _fitting(left, room)
            self.held[rank] += chosen
            self._room[rank] -= sum(piece.size for piece in chosen)
        return left

    def cut(self, documents: list[_Piece], padding: Interval) -> None:
        """Fill up one rank after the other with parts of these, then with padding."""
        pairs = np.array([sum(piece.pairs for piece in held) for held in self.held])
        self.cost = _imbalance(pairs) + (OF_A_CUT if documents else 0.0)
        rest = iter((*(piece.run for piece in documents), padding))
        run = next(rest)
        for held, room in zip(self.held, self._room.tolist(), strict=True):
            while room:
                if not run.size:
                    run = next(rest)
                part = Interval(run.start, min(run.stop, run.start + room))
                held.append(_Piece(part, 0))
                run = Interval(part.stop, run.stop)
                room -= part.size


def _fitting(documents: list[_Piece], room: int) -> tuple[list[_Piece], list[_Piece]]:
    """Documents that fill the room as far as any do, and the others."""
    sums = [1]  # bit n: whether some of the documents so far have n tokens together
    for document in documents:
        sums.append(sums[-1] | (sums[-1] << document.size) & ((2 << room) - 1))
    chosen, others, total = [], [], sums[-1].bit_length() - 1
    for document, without in zip(reversed(documents), reversed(sums[:-1]), strict=True):
        if without >> total & 1:
            others.append(document)
        else:
            chosen.append(document)
            total -= document.size
    return chosen, others[::-1]


class _Swap(NamedTuple):
    most_pairs: int
    """Of the two ranks, afterwards."""
    rank: int
    given: int
    taken: int


def _pairs(length: int) -> int:
    """Of a document."""
    return length * (length + 1) // 2


def _imbalance(pairs: Ints) -> float:
    return int(pairs.max()) * len(pairs) / max(1, int(pairs.sum())) - 1


def _numbers(mine: Iterable[int], theirs: Iterable[int]) -> Ints:
    """`[mine, theirs]`: by how much each of mine is more."""
    rows, columns = (np.fromiter(numbers, dtype=np.int64) for numbers in (mine, theirs))
    return rows[:, None] - columns
