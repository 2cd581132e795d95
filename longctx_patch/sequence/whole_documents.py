"""Placement of a packed row by whole documents: ranks then exchange next to nothing.

Documents are placed longest first, each on the rank with the fewest pairs among those that have
room for it. Long ones spread over the ranks and short ones even them out: the greedy rule for
jobs on machines (Graham 1969), where each machine has room for its share of the tokens.

The shortest documents fill up each rank's share to the last token: some of them add up to it (a
subset sum, by dynamic programming over bits). If none do, the documents left over are cut.

A document that would keep one rank busy for longer than the others can be cut beforehand, into
pieces of equal pairs that are placed like documents: its keys travel, those of others don't.

Each rank computes the placement by itself, so all arithmetic is in whole numbers: different CPUs
round sums of floats differently.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from math import ceil, inf, isqrt
from typing import NamedTuple

import numpy as np

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout, Rows, even_cuts
from longctx_patch.sequence.pairs import GOAL, Ints, excess, pairs_of

NEVER = np.iinfo(np.int64).max
"""A number of pairs that no row reaches."""

SWAP_GOAL = 0.002
"""Imbalance at which no more documents are swapped. It is below `GOAL` because a swap of whole
documents costs no bytes."""

FILLERS = (8, 4, 16)
"""Numbers of short documents per rank that are kept back to fill up the ranks (at most half of all
documents), in the order in which they are tried: sums of so many reach most numbers."""

COST_OF_A_CUT = 0.03
"""Imbalance that is worth accepting to leave no document cut, because an exchange and the kernel
calls that it brings take about as long."""

MOST_LOOKED_AT = 64
"""Documents that each rank offers for a swap: its longest, which differ most in their pairs."""

SWAPS, PARTNERS = 8, 4
"""Swaps per rank, and ranks compared for each swap, at most: GPUs may wait for a placement."""


def whole_documents(documents: Documents, num_ranks: int, most_share: float = inf) -> Layout:
    """A layout in which shares of the tokens differ by one at most, and few documents are cut.

    A document is cut beforehand if it has more pairs than `most_share` times a rank's share. Others
    are mostly whole where each rank gets several and their lengths have no common divisor.

    Shares of pairs are as even as the documents allow: a document that is longer than the others
    together leaves ranks without work. Intervals are in the order of the tokens, and ranks in the
    order of their first tokens.
    """
    pairs = sum(map(pairs_of, documents.lengths, documents.begins))
    pieces = _pieces(documents, most_share * pairs / num_ranks)
    padding = Interval(documents.edges[-1], documents.num_tokens)
    best = _placed(pieces, padding, num_ranks, FILLERS[0])
    for fillers in FILLERS[1:]:
        if best.cost <= GOAL:
            break
        other = _placed(pieces, padding, num_ranks, fillers)
        best = min(best, other, key=lambda bins: bins.cost)
    return Layout(tuple(sorted(Rows.of(piece.run for piece in held).runs for held in best.held)))


class _Piece(NamedTuple):
    """A document, or a part of one: its tokens and its allowed pairs."""

    run: Interval
    pairs: int

    @property
    def size(self) -> int:
        return self.run.size


def _pieces(documents: Documents, most_pairs: float) -> list[_Piece]:
    """The documents; those with more pairs than `most_pairs` in parts with equally many pairs."""
    found = []
    sizes = zip(documents.edges, documents.lengths, documents.begins, strict=False)
    for start, length, begins in sizes:
        count = max(1, ceil(pairs_of(length, begins) / most_pairs)) if most_pairs else 1
        # The first n tokens have about (n + begins)^2 / 2 - begins^2 / 2 pairs.
        total = length * (length + 2 * begins)
        edges = [isqrt(begins**2 + total * part // count) - begins for part in range(count + 1)]
        found += [
            _Piece(Interval(start + a, start + b), pairs_of(b, begins) - pairs_of(a, begins))
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
    """The pieces that each rank has been given, and the room that it has left."""

    def __init__(self, shares: list[Interval], pairs_of_left: int) -> None:
        """`pairs_of_left`: pairs per token of the documents that fill up the room at the end."""
        self._pairs_of_left = pairs_of_left
        self._room = np.array([share.size for share in shares], dtype=np.int64)
        self._pairs = pairs_of_left * self._room
        """The pairs of each rank, with those of what will fill its room."""
        self.held: list[list[_Piece]] = [[] for _ in shares]
        """The pieces of each rank, the longest first."""
        self.cost = inf
        """Imbalance of the filled ranks, and what cuts cost besides."""

    def take(self, documents: list[_Piece], *, leave: int) -> list[_Piece]:
        """Give each document whole to a rank, and return those for which no rank has room.

        Each rank keeps room for `leave` tokens.
        """
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
        """Swap documents of the busiest rank for shorter ones of others, as long as that helps.

        Each step makes the swap that helps most.
        """
        for _ in range(SWAPS * len(self.held)):
            if excess(self._pairs) <= SWAP_GOAL:
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
        longer = _differences([piece.size for piece in mine], [piece.size for piece in theirs])
        relief = _differences(map(self._more_pairs, mine), map(self._more_pairs, theirs))
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
        """Pairs that a rank gets by a piece, less those of what would fill the room instead."""
        return piece.pairs - self._pairs_of_left * piece.size

    def fill(self, documents: list[_Piece]) -> list[_Piece]:
        """Fill each rank's room with documents as far as sums reach; return the documents left."""
        left = documents
        for rank, room in enumerate(self._room.tolist()):
            chosen, left = _fitting(left, room)
            self.held[rank] += chosen
            self._room[rank] -= sum(piece.size for piece in chosen)
        return left

    def cut(self, documents: list[_Piece], padding: Interval) -> None:
        """Fill up one rank after the other with parts of these, then with padding."""
        pairs = np.array([sum(piece.pairs for piece in held) for held in self.held])
        self.cost = excess(pairs) + (COST_OF_A_CUT if documents else 0.0)
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
    """The documents whose lengths add up to the most tokens within `room`, and the others."""
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
    """Pairs of the fuller of the two ranks after the swap."""
    rank: int
    given: int
    taken: int


def _differences(mine: Iterable[int], theirs: Iterable[int]) -> Ints:
    """`[mine, theirs]`: each number of mine less each number of theirs."""
    rows, columns = (np.fromiter(numbers, dtype=np.int64) for numbers in (mine, theirs))
    return rows[:, None] - columns
