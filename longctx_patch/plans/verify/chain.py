"""Proof that a chain is that of a row, by other means than it was made by."""

from collections.abc import Iterator

from longctx_patch.plans.chain import Chain, Needs
from longctx_patch.plans.verify.walk import PlanError
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout


def verify_chain(chain: Chain, layout: Layout, documents: Documents) -> None:
    """Check every rule: segments fill the row one after another, each lies in one document and
    where the layout has its tokens, and begins its document exactly where that begins.

    Raises PlanError with all complaints about a chain that is wrong.
    """
    _raise("chain", list(_complaints(chain, layout, documents)))


def verify_needs(chain: Chain, needs: Needs, num_tokens: int | None) -> None:
    """Check that every segment gets the items of what lies before it in its document: of all
    segments (`num_tokens` None), or of those that hold the `num_tokens` tokens before it.

    Raises PlanError with all complaints.
    """
    _raise("chain's exchange", list(_missing(chain, needs, num_tokens)))


def _raise(what: str, complaints: list[str]) -> None:
    if complaints:
        raise PlanError(f"the {what} is wrong:\n" + "\n".join(complaints))


def _complaints(chain: Chain, layout: Layout, documents: Documents) -> Iterator[str]:
    starts, end = set(documents.edges), 0
    for number, segment in enumerate(chain.segments):
        where, tokens = f"segment {number} of tokens {tuple(segment.tokens)[:2]}", segment.tokens
        if tokens.start != end or not tokens.size:
            yield f"order: {where} does not go on from token {end}"
        end = tokens.stop
        if any(tokens.start < edge < tokens.stop for edge in documents.edges):
            yield f"documents: {where} reaches over the end of a document"
        if segment.begins != (tokens.start in starts):
            yield f"documents: {where} begins one: {segment.begins}"
        if not segment.begins and segment.document != chain.segments[number - 1].document:
            yield f"documents: {where} is in document {segment.document}"
        places = [(rank, slots.start - held.start) for rank, slots, held in layout.places(tokens)]
        if set(places) != {(segment.rank, segment.slots.start - tokens.start)}:
            yield f"place: {where} is not at slot {segment.slots.start} of rank {segment.rank}"
    if end != documents.num_tokens:
        yield f"order: the segments end at token {end} of {documents.num_tokens}"


def _missing(chain: Chain, needs: Needs, num_tokens: int | None) -> Iterator[str]:
    for number, (segment, needed) in enumerate(zip(chain.segments, needs, strict=True)):
        reach = -1 if num_tokens is None else segment.tokens.start - num_tokens
        expected: list[int] = []
        other = number
        while not chain.segments[other].begins and chain.segments[other].tokens.start > reach:
            other -= 1
            expected.insert(0, other)
        if list(needed) != expected:
            yield f"items: segment {number} gets those of {list(needed)}, it needs {expected}"
        for other in expected:
            source = chain.segments[other].rank
            if source != segment.rank and other not in chain.wanted(needs, source, segment.rank):
                yield f"messages: rank {source} does not send segment {other} to {segment.rank}"
