"""Proof that a chain is that of a row, by other means than it was made by."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from longctx_patch.plans.chain import Chain, Needs
from longctx_patch.plans.head_split import HeadSplit
from longctx_patch.plans.verify.walk import PlanError
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout


def verify_chain(chain: Chain, layout: Layout, documents: Documents) -> None:
    """Check every rule: segments fill the row one after another, each lies in one document and
    where the layout has its tokens, and goes on from the segment that ends with the token before it
    in its document, or with the last one of the document's parent.

    Raises PlanError with all complaints about a chain that is wrong.
    """
    _raise("chain", list(_complaints(chain, layout, documents)))


def verify_needs(chain: Chain, needs: Needs, num_tokens: int | None) -> None:
    """Check that every segment gets the items of what it goes on from: of all segments
    (`num_tokens` None), or of those that hold the `num_tokens` tokens before it.

    Raises PlanError with all complaints.
    """
    _raise("chain's exchange", list(_missing(chain, needs, num_tokens)))


def verify_heads(split: HeadSplit, layout: Layout, ring_layout: Layout) -> None:
    """Check an exchange of heads for tokens around a chain: the ranks of each Ulysses group, one
    after the other, hold what the ring's layout gives their ring rank, each head is computed by one
    rank, and it is computed with the key head, or the group, that is its own.

    Raises PlanError with all complaints.
    """
    complaints = [*_misplaced(split.degree, layout, ring_layout), *_wrong_heads(split)]
    _raise("exchange of a recurrence's heads", complaints)


def _raise(what: str, complaints: list[str]) -> None:
    if complaints:
        raise PlanError(f"the {what} is wrong:\n" + "\n".join(complaints))


def _complaints(chain: Chain, layout: Layout, documents: Documents) -> Iterator[str]:
    edges, end = documents.edges, 0
    starts, parents = set(edges), dict(enumerate(documents.parents))
    ending = {segment.tokens.stop: number for number, segment in enumerate(chain.segments)}
    for number, segment in enumerate(chain.segments):
        where, tokens = f"segment {number} of tokens {tuple(segment.tokens)[:2]}", segment.tokens
        if tokens.start != end or not tokens.size:
            yield f"order: {where} does not go on from token {end}"
        end = tokens.stop
        after = bisect_right(edges, tokens.start)
        if any(edge < tokens.stop for edge in edges[after : after + 1]):
            yield f"documents: {where} reaches over the end of a document"
        if segment.document != after - 1:
            yield f"documents: {where} is in document {segment.document}"
        last = tokens.start  # one past the token before it
        if last in starts:
            parent = parents.get(after - 1, -1)
            last = edges[parent + 1] if parent >= 0 else 0
        if segment.before != (expected := ending.get(last)):
            yield f"documents: {where} goes on from segment {segment.before}, not {expected}"
        places = [(rank, slots.start - held.start) for rank, slots, held in layout.places(tokens)]
        if set(places) != {(segment.rank, segment.slots.start - tokens.start)}:
            yield f"place: {where} is not at slot {segment.slots.start} of rank {segment.rank}"
    if end != documents.num_tokens:
        yield f"order: the segments end at token {end} of {documents.num_tokens}"


def _missing(chain: Chain, needs: Needs, num_tokens: int | None) -> Iterator[str]:
    paths, ends = list[list[int]](), list[int]()  # what each goes on from, where its tokens end
    for number, (segment, needed) in enumerate(zip(chain.segments, needs, strict=True)):
        before = segment.before
        path, start = ([], 0) if before is None else ([*paths[before], before], ends[before])
        paths.append(path)
        ends.append(start + segment.tokens.size)
        expected = [n for n in path if num_tokens is None or ends[n] > start - num_tokens]
        if list(needed) != expected:
            yield f"items: segment {number} gets those of {list(needed)}, it needs {expected}"
        for other in expected:
            source = chain.segments[other].rank
            if source != segment.rank and other not in chain.wanted(needs, source, segment.rank):
                yield f"messages: rank {source} does not send segment {other} to {segment.rank}"


def _misplaced(degree: int, layout: Layout, ring_layout: Layout) -> Iterator[str]:
    if layout.num_ranks != degree * ring_layout.num_ranks:
        yield f"ranks: {layout.num_ranks} for rings of {ring_layout.num_ranks} times {degree}"
        return
    for ring_rank in range(ring_layout.num_ranks):
        members = range(ring_rank * degree, (ring_rank + 1) * degree)
        held = [tokens for rank in members for tokens in layout.intervals[rank]]
        if _runs(held) != _runs(ring_layout.intervals[ring_rank]):
            yield f"order: ranks {list(members)} do not hold the tokens of ring rank {ring_rank}"


def _runs(intervals: Iterable[Interval]) -> list[tuple[int, int]]:
    """(start, stop) of the tokens, with those joined that go on from each other."""
    runs: list[tuple[int, int]] = []
    for start, stop, _ in intervals:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs


def _wrong_heads(split: HeadSplit) -> Iterator[str]:
    computed = [head for cut in split.query for head in range(cut.start, cut.stop)]
    if computed != list(range(split.num_heads)):
        yield f"heads: {computed} are computed, of {split.num_heads}"
    for rank, (cut, keys) in enumerate(zip(split.query, split.key_value, strict=True)):
        for local in range(cut.size):
            # A kernel shares each of its key heads among equally many heads, in order.
            found = keys.start + local * keys.size // cut.size
            own = (cut.start + local) * split.num_kv_heads // split.num_heads
            if found != own:
                yield f"key heads: rank {rank} computes head {cut.start + local} with {found}"
