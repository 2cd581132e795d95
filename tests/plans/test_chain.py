"""Chains of segments over every layout: each needs exactly what lies before it in its document."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.plans.chain import Chain, Needs, make_chain
from longctx_patch.plans.traffic import Traffic
from longctx_patch.plans.verify.chain_proof import verify_chain, verify_needs
from longctx_patch.plans.verify.walk import PlanError
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, contiguous, striped, zigzag

ROWS = (
    Documents.one(43),
    Documents((1, 2, 17, 3, 1, 16), 43),
    Documents((30, 5), 43),
    Documents((43,) + (1,) * 9, 61),
    Documents((1, 17, 2, 1, 9, 5, 3, 6, 2), 53, (-1, 0, 1, 2, 2, 1, 0, -1, 7)),
)


def cases() -> list[tuple[Layout, Documents]]:
    found = []
    for documents, ring, ulysses in product(ROWS, (1, 2, 3, 4), (1, 2)):
        for layout in ("contiguous", "zigzag", None):
            config = LongContextConfig(ring_degree=ring, ulysses_degree=ulysses, layout=layout)
            found.append((config.layout_of(documents), documents))
    return found


def by_tokens(layout: Layout, documents: Documents, reach: int | None) -> dict[int, set[int]]:
    """For the first token of each run of a document on a rank, the tokens before it in its document
    and in those that it goes on from (the last `reach` of them): token by token, from what the
    layout and the documents say."""
    rank_of = {
        t: rank for rank, held in enumerate(layout.intervals) for i in held for t in range(*i)
    }
    document_of = [n for n, length in enumerate(documents.lengths) for _ in range(length)]
    document_of += [len(documents.lengths)] * (documents.num_tokens - len(document_of))
    paths = [{document} for document in range(len(documents.lengths) + 1)]
    for document, parent in enumerate(documents.parents):
        paths[document] |= paths[parent] if parent >= 0 else set()
    wanted = {}
    for token in range(documents.num_tokens):
        inside = token and document_of[token - 1] == document_of[token]
        if inside and rank_of[token - 1] == rank_of[token]:
            continue
        before = [t for t in range(token) if document_of[t] in paths[document_of[token]]]
        wanted[token] = set(
            before if reach is None else before[len(before) - reach :] if reach else ()
        )
    return wanted


def test_whole_documents_that_follow_each_other_are_one_call() -> None:
    for layout, documents in cases():
        chain = make_chain(layout, documents)
        sizes = Counter(segment.document for segment in chain.segments)
        for branch, parent in enumerate(documents.parents):
            sizes.update((branch, parent) if parent >= 0 else ())  # a state goes from one to one
        for rank in range(chain.num_ranks):
            joined = chain.runs(rank)
            assert [n for call in joined for n in call] == [*chain.of_rank(rank)]
            whole = [sizes[chain.segments[call[0]].document] == 1 for call in joined]
            assert not any(one and other for one, other in pairwise(whole))
            for call, is_whole in zip(joined, whole, strict=True):
                assert is_whole or len(call) == 1
                documents_of = [chain.segments[number].document for number in call]
                assert all(sizes[document] == 1 for document in documents_of) == is_whole


@pytest.mark.parametrize("reach", [None, 1, 3])
def test_segments_get_what_lies_before_them(reach: int | None) -> None:
    for layout, documents in cases():
        chain = make_chain(layout, documents)
        verify_chain(chain, layout, documents)
        needs = chain.states if reach is None else chain.tails(reach)
        verify_needs(chain, needs, reach)
        for first, tokens in by_tokens(layout, documents, reach).items():
            (number,) = [n for n, s in enumerate(chain.segments) if s.tokens.start == first]
            got = {t for other in needs[number] for t in range(*chain.segments[other].tokens)}
            if reach is None:
                assert got == tokens
            else:
                assert got >= tokens


def test_one_document_hands_one_map_from_each_rank_to_each_later_one() -> None:
    """Whatever its length: 3 x 4 / 2 messages; a first segment sends its state alone."""
    for length in (41, 4001):
        chain = make_chain(contiguous(length, 4), Documents.one(length))
        sizes = [10 if segment.begins else 30 for segment in chain.segments]
        traffic = [chain.traffic(chain.states, sizes.__getitem__, rank) for rank in range(4)]
        assert [t.forward for t in traffic] == [
            Traffic(3, 30),
            Traffic(2, 60),
            Traffic(1, 30),
            Traffic(),
        ]
        assert [t.backward for t in traffic] == [
            Traffic(),
            Traffic(1, 10),
            Traffic(2, 40),
            Traffic(3, 70),
        ]


def test_documents_that_are_whole_on_a_rank_send_nothing() -> None:
    documents = Documents((10, 10, 10, 10), 40)
    chain = make_chain(contiguous(40, 2), documents)
    assert all(
        chain.traffic(chain.states, lambda _: 1, rank).forward == Traffic() for rank in (0, 1)
    )


def test_a_prompt_hands_one_state_to_each_branch() -> None:
    """A branch on each of three ranks, of which the last one goes on from the one before it."""
    documents = Documents((10, 10, 10, 10), 40, (-1, 0, 0, 2))
    chain = make_chain(contiguous(40, 4), documents)
    sizes = [10 if segment.begins else 30 for segment in chain.segments]
    assert chain.states == ((), (0,), (0,), (0, 2))
    traffic = chain.traffic_of_ranks(chain.states, sizes.__getitem__)
    sent = [Traffic(3, 30), Traffic(), Traffic(1, 30), Traffic()]
    returned = [Traffic(), Traffic(1, 10), Traffic(1, 10), Traffic(2, 40)]
    assert [(t.forward, t.backward) for t in traffic] == list(zip(sent, returned, strict=True))


def test_every_second_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"striped layout under layers.*Use layout='contiguous'"):
        make_chain(striped(8, 2), Documents.one(8))


def mutants(chain: Chain) -> dict[str, Chain]:
    first, second, *rest = chain.segments
    return {
        "order": replace(chain, segments=(second, first, *rest)),
        "place": replace(chain, segments=(first, second._replace(rank=3), *rest)),
        "documents": replace(chain, segments=(first, second._replace(before=None), *rest)),
        "segments end": replace(chain, segments=chain.segments[:-1]),
    }


def test_the_verifier_finds_every_kind_of_mistake() -> None:
    documents, layout = Documents((30, 13), 43), zigzag(43, 3)
    chain = make_chain(layout, documents)
    for rule, wrong in mutants(chain).items():
        with pytest.raises(PlanError, match=rule):
            verify_chain(wrong, layout, documents)
    states = chain.states
    with pytest.raises(PlanError, match="items: segment 1 gets those of"):
        verify_needs(chain, (states[0], (), *states[2:]), None)
    with pytest.raises(PlanError, match="items"):
        verify_needs(chain, chain.tails(1), None)


@pytest.mark.parametrize("wrong", [None, 1])
def test_the_verifier_finds_a_branch_from_zero_or_from_its_sibling(wrong: int | None) -> None:
    documents, layout = Documents((10, 10, 10), 30, (-1, 0, 0)), contiguous(30, 3)
    *first, last = make_chain(layout, documents).segments
    with pytest.raises(PlanError, match=f"segment 2 .* goes on from segment {wrong}, not 0"):
        verify_chain(Chain((*first, last._replace(before=wrong)), 3), layout, documents)


class Withholds(Chain):
    """Leaves the first item out of each message."""

    def wanted(self, needs: Needs, source: int, destination: int) -> tuple[int, ...]:
        return super().wanted(needs, source, destination)[1:]


def test_the_verifier_finds_items_that_are_needed_and_not_sent() -> None:
    documents, layout = Documents((30, 13), 43), zigzag(43, 3)
    chain = make_chain(layout, documents)
    mute = Withholds(chain.segments, chain.num_ranks)
    for needs, reach in ((chain.states, None), (chain.tails(2), 2)):
        verify_needs(chain, needs, reach)
        with pytest.raises(PlanError, match="messages: rank 0 does not send segment 0 to 1"):
            verify_needs(mute, needs, reach)
