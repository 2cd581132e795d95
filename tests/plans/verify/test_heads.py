"""The proof that heads of a recurrence are exchanged for the right tokens."""

from dataclasses import replace
from itertools import product

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.plans.head_split import HeadSplit
from longctx_patch.plans.recurrent import states_because
from longctx_patch.plans.verify.chain_proof import verify_heads
from longctx_patch.plans.verify.walk import PlanError
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, contiguous, zigzag

PACKED = Documents((30, 5, 8), 43)
ZIGZAG = LongContextConfig(layout="zigzag")


def test_every_exchange_that_is_allowed_is_proven() -> None:
    refused = set()
    for heads, groups, degree in product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4), (2, 3, 4)):
        if heads % groups:
            continue
        if states_because(heads, groups, degree) is not None:
            refused.add((heads, groups, degree))
            continue
        split = HeadSplit(heads, groups, degree)
        assert (
            len({(a.size, b.size) for a, b in zip(split.query, split.key_value, strict=True)}) == 1
        )
        for ring, config in product((1, 2, 3), (ZIGZAG, replace(ZIGZAG, layout=None))):
            config = replace(config, ulysses_degree=degree, ring_degree=ring)
            verify_heads(split, config.layout_of(PACKED), config.ring_layout_of(PACKED))
    assert {(4, 4, 3), (6, 3, 2), (6, 2, 3)} < refused
    assert not {(4, 2, 4), (8, 1, 4), (6, 3, 3), (12, 4, 2)} & refused


def test_one_rank_exchanges_nothing() -> None:
    assert states_because(4, 2, 1) == "ulysses_degree=1 exchanges no heads"


class Half(HeadSplit):
    """Each rank leaves out the second half of its heads."""

    @property
    def query(self) -> tuple[Interval, ...]:
        return (Interval(0, 1), Interval(2, 3))


class Wrong(HeadSplit):
    """Rank 1 computes with the key heads of rank 0."""

    @property
    def key_value(self) -> tuple[Interval, ...]:
        return (Interval(0, 1), Interval(0, 1))


def test_each_kind_of_mistake_is_found() -> None:
    split, ring = HeadSplit(4, 2, 2), zigzag(43, 2)
    with pytest.raises(PlanError, match=r"order: ranks \[0, 1\] do not hold the tokens of ring"):
        verify_heads(split, contiguous(43, 4), ring)
    with pytest.raises(PlanError, match="ranks: 6 for rings of 2 times 2"):
        verify_heads(split, ring.split_each(3), ring)
    with pytest.raises(PlanError, match=r"heads: \[0, 2\] are computed, of 4"):
        verify_heads(Half(4, 2, 2), ring.split_each(2), ring)
    with pytest.raises(PlanError, match="key heads: rank 1 computes head 2 with 0"):
        verify_heads(Wrong(4, 2, 2), ring.split_each(2), ring)
