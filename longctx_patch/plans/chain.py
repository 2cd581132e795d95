"""The plan of a recurrent layer: whose state goes on from whose.

The tokens that one rank holds of one document, one after another, are a segment. A recurrent layer
takes a segment as an affine map of the state before it, S -> M S + U, and a short convolution takes
it as its last tokens. So a segment needs one item of each of some segments before it, of a size
that does not depend on their length, and ranks exchange these items once per layer. The branches of
a document go on from its last segment, each from the same state.

The maps of a recurrence compose as those of a parallel scan do (Blelloch 1990); for gated delta
nets see Yang et al. 2024 (arXiv 2412.06464), for Mamba-2 section 8.2 of Dao and Gu 2024
(arXiv 2405.21060).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout, slots_of

KEPT_AT_MOST = 2**26
"""Bytes of others' items that one exchange may leave on a rank until backward. They don't grow with
the row, but with the number of segments before a rank's last one, and so of ranks."""


class Segment(NamedTuple):
    """Tokens of one document that lie one after another on one rank."""

    tokens: Interval
    slots: Interval
    """Their places among the rank's tokens."""
    rank: int
    document: int
    """The number of its document; padding has those after the last one."""
    before: int | None = None
    """The number of the segment that it goes on from: of its document, or the last one of that
    document's parent."""

    @property
    def begins(self) -> bool:
        """Says whether its document begins with it, and is no branch."""
        return self.before is None


Needs = tuple[tuple[int, ...], ...]
"""The numbers of the earlier segments whose items each segment needs, in their order."""


@dataclass(frozen=True)
class Chain:
    """The segments of a row over `num_ranks` ranks, in the order of their tokens."""

    segments: tuple[Segment, ...]
    num_ranks: int

    def __hash__(self) -> int:
        return self._hash  # each layer looks up what is known of its chain, of many segments

    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.num_ranks))

    @cached_property
    def _of_rank(self) -> tuple[tuple[int, ...], ...]:
        numbers: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for number in sorted(range(len(self.segments)), key=lambda n: self.segments[n].slots):
            numbers[self.segments[number].rank].append(number)
        return tuple(map(tuple, numbers))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Numbers of the segments of a rank, in the order of its slots."""
        return self._of_rank[rank]

    @cached_property
    def _runs(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(self._runs_of(rank)) for rank in range(self.num_ranks))

    def runs(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The segments of a rank, in the order of its slots: whole documents that follow one
        another together, which one call of a kernel may run, and others one by one."""
        return self._runs[rank]

    def _runs_of(self, rank: int) -> Iterator[tuple[int, ...]]:
        for is_whole, numbers in groupby(self.of_rank(rank), self._is_whole):
            following = tuple(numbers)
            yield from [following] if is_whole else [(number,) for number in following]

    def _is_whole(self, number: int) -> bool:
        return self.segments[number].begins and number not in self.needed

    @cached_property
    def needed(self) -> frozenset[int]:
        """Segments whose maps others need."""
        return frozenset(number for needed in self.states for number in needed)

    @cached_property
    def states(self) -> Needs:
        """The needs of a recurrence: the maps of all segments of the document so far, and of what
        it goes on from."""
        return tuple(tuple(self._before(number))[::-1] for number in range(len(self.segments)))

    @cached_property
    def work(self) -> tuple["RankWork", ...]:
        """The tokens that each rank runs of a recurrence."""
        found = [RankWork()] * self.num_ranks
        for number, segment in enumerate(self.segments):
            rank, size = segment.rank, segment.tokens.size
            if segment.begins:
                found[rank] = found[rank].plus(RankWork(begun=size))
            else:
                mapped = size if number in self.needed else 0
                found[rank] = found[rank].plus(RankWork(mapped=mapped, continued=size))
        return tuple(found)

    def tails(self, num_tokens: int) -> Needs:
        """Returns what a convolution over `num_tokens` tokens before each needs: the ends of as
        many segments as have them."""
        return tuple(self._reaching(number, num_tokens) for number in range(len(self.segments)))

    def _before(self, number: int) -> Iterator[int]:
        """The segments that one goes on from, the nearest first."""
        while (before := self.segments[number].before) is not None:
            yield before
            number = before

    def _reaching(self, number: int, num_tokens: int) -> tuple[int, ...]:
        found: list[int] = []
        for other in self._before(number):
            if num_tokens <= 0:
                break
            found.insert(0, other)
            num_tokens -= self.segments[other].tokens.size
        return tuple(found)

    def wanted(self, needs: Needs, source: int, destination: int) -> tuple[int, ...]:
        """Numbers of the segments whose items one rank sends to another, in one message."""
        return _wanted(self, needs).get((source, destination), ())

    def is_kept(self, needs: Needs, num_bytes: Callable[[int], int]) -> bool:
        """Says whether layers that keep attention keep what comes in this exchange too, so that
        their recompute makes none. All ranks do or none does, as all take part in an exchange."""
        got = [0] * self.num_ranks
        for (_, destination), numbers in _wanted(self, needs).items():
            got[destination] += sum(map(num_bytes, numbers))
        return max(got) <= KEPT_AT_MOST

    def traffic(self, needs: Needs, num_bytes: Callable[[int], int], rank: int) -> "ChainTraffic":
        """Returns what a rank sends when all get what they need; an item of segment n has
        `num_bytes(n)`.

        Backward returns the gradient of each item by the way it came.
        """
        return self.traffic_of_ranks(needs, num_bytes)[rank]

    def traffic_of_ranks(
        self, needs: Needs, num_bytes: Callable[[int], int]
    ) -> tuple["ChainTraffic", ...]:
        """The same of every rank."""
        forward, backward = [Traffic()] * self.num_ranks, [Traffic()] * self.num_ranks
        for (source, destination), numbers in _wanted(self, needs).items():
            message = Traffic(1, sum(map(num_bytes, numbers)))
            forward[source] += message
            backward[destination] += message
        is_kept = max(traffic.bytes for traffic in backward) <= KEPT_AT_MOST
        replay = [Traffic()] * self.num_ranks if is_kept else forward
        return tuple(map(ChainTraffic, forward, backward, replay))


class RankWork(NamedTuple):
    """Tokens that one rank runs."""

    begun: int = 0
    """Tokens of segments that begin a document; they run before states travel."""
    mapped: int = 0
    """Tokens of other segments whose maps are needed; they run before, too."""
    continued: int = 0
    """Tokens of other segments, mapped or not; they run after states have travelled."""

    def plus(self, other: "RankWork") -> "RankWork":
        return RankWork(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class ChainTraffic(NamedTuple):
    """Messages and bytes that one rank sends for the exchanges of one recurrent layer."""

    forward: Traffic = Traffic()
    backward: Traffic = Traffic()
    replay: Traffic = Traffic()
    """The messages of a recompute that gets the kept items from its frame. A recompute without a
    frame sends what forward does."""

    def without_backward(self) -> "ChainTraffic":
        """The traffic where nothing that goes into the exchanges has a gradient."""
        return self._replace(backward=Traffic())

    def plus(self, other: "ChainTraffic") -> "ChainTraffic":
        return ChainTraffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@lru_cache(maxsize=64)
def _wanted(chain: Chain, needs: Needs) -> dict[tuple[int, int], tuple[int, ...]]:
    """(source, destination) -> the segments whose items travel, each once, in their order."""
    found: dict[tuple[int, int], set[int]] = {}
    for segment, needed in zip(chain.segments, needs, strict=True):
        for number in needed:
            source = chain.segments[number].rank
            if source != segment.rank:
                found.setdefault((source, segment.rank), set()).add(number)
    return {pair: tuple(sorted(found[pair])) for pair in sorted(found)}


@lru_cache(maxsize=64)
def make_chain(layout: Layout, documents: Documents) -> Chain:
    """The segments of a row.

    Raises ValueError for a layout that takes every n-th token: each token would be a segment.
    """
    if any(tokens.step > 1 for rank in layout.intervals for tokens in rank):
        raise ValueError(
            "a striped layout under layers whose state runs along the sequence: each token would "
            "be on another rank than the one before it. Use layout='contiguous' or 'zigzag'."
        )
    edges = [*documents.edges, documents.num_tokens]
    segments = sorted(
        segment for rank in range(layout.num_ranks) for segment in _cut(layout, rank, edges)
    )
    return Chain(tuple(_linked(segments, documents)), layout.num_ranks)


def _linked(segments: list[Segment], documents: Documents) -> Iterator[Segment]:
    """The segments of a row, each with the one that it goes on from."""
    parents, last = dict(enumerate(documents.parents)), dict[int, int]()
    for number, segment in enumerate(segments):
        parent = parents.get(segment.document, -1)
        yield segment._replace(before=last.get(segment.document, last.get(parent)))
        last[segment.document] = number


def _cut(layout: Layout, rank: int, edges: list[int]) -> Iterator[Segment]:
    """The segments of one rank; where documents end, a new one begins. `edges` have the end too."""
    for tokens, slots in _joined(slots_of(layout.intervals[rank])):
        start, document = tokens.start, bisect_right(edges, tokens.start) - 1
        while start < tokens.stop:
            stop = min(tokens.stop, edges[document + 1])
            part = Interval(start, stop)
            yield Segment(
                tokens=part,
                slots=part.shift(slots.start - tokens.start),
                rank=rank,
                document=document,
            )
            start, document = stop, document + 1


def _joined(runs: list[tuple[Interval, Interval]]) -> list[tuple[Interval, Interval]]:
    """The same runs, with those joined that follow each other."""
    found: list[tuple[Interval, Interval]] = []
    for tokens, slots in runs:
        if found and found[-1][0].stop == tokens.start:
            before, filled = found.pop()
            tokens, slots = Interval(before.start, tokens.stop), Interval(filled.start, slots.stop)
        found.append((tokens, slots))
    return found
