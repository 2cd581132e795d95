"""Plans under masks of every kind are expanded pair by pair, broken, and executed.

What a plan computes is read only from its pieces and its layout, and compared with a table that is
written from the definition of each mask, so the code that cuts masks into pieces is not trusted.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longctx_patch.config import LongContextConfig
from longctx_patch.plans import EVERYONE, Plan, PlanError, Share, verify_plan
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import function_mask
from longctx_patch.sequence.regions import Piece
from tests.engine.exact import Case, assert_exact
from tests.masked import Masked as MaskedCase
from tests.masked import distances, seen
from tests.plans.random_masks import (
    NAMED,
    Masked,
    masked_plans,
    masks,
    rows_of,
    tokens,
    works_of,
)

# What a plan computes.


def times_computed(plan: Plan) -> dict[Share, NDArray[np.int64]]:
    """How often any rank computes each (query token, key token), for each group of heads."""
    n = plan.layout.num_tokens
    held = [plan.layout.positions(rank).numpy() for rank in range(plan.num_ranks)]
    times: dict[Share, NDArray[np.int64]] = {}
    for work in works_of(plan):
        queries = held[work.q_owner]
        keys = np.arange(n) if work.kv_owner == EVERYONE else held[work.kv_owner]
        table = times.setdefault(work.heads, np.zeros((n, n), dtype=np.int64))
        for piece in work.pieces:
            bits = piece.bits()
            assert piece.area == np.count_nonzero(bits) > 0
            rows, columns = queries[slice(*piece.q)], keys[slice(*piece.kv)]
            assert bits.shape == (len(rows), len(columns)), "no such rows or columns"
            table[np.ix_(rows, columns)] += bits
    return times


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(masked_plans())
def test_every_allowed_pair_is_computed_once_and_no_other(made: Masked) -> None:
    plan, table = made
    times = times_computed(plan)
    assert len({heads.parts for heads in times}) <= 1
    assert len(times) == next((heads.parts for heads in times), 0)
    for counted in times.values():
        assert np.array_equal(counted, table), plan.mask
    assert times or not table.any()
    assert verify_plan(plan).area == np.count_nonzero(table)


# Refused.


def with_pieces(plan: Plan, step: int, work: int, pieces: tuple[Piece, ...]) -> Plan:
    """The plan with other pieces in one work; a work without pieces is dropped."""
    steps, works = list(plan.steps), list(plan.steps[step].works)
    works[work : work + 1] = [works[work]._replace(pieces=pieces)] if pieces else []
    steps[step] = replace(steps[step], works=tuple(works))
    return replace(plan, steps=tuple(steps))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_plans(), st.data())
def test_a_piece_that_is_missing_moved_or_computed_twice_is_rejected(
    made: Masked, data: st.DataObject
) -> None:
    steps = [number for number, step in enumerate(made.plan.steps) if step.works]
    assume(steps)
    step = data.draw(st.sampled_from(steps))
    work = data.draw(st.integers(0, len(made.plan.steps[step].works) - 1))
    piece, *others = data.draw(st.permutations(made.plan.steps[step].works[work].pieces))
    moved = [piece.moved(*by) for by in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1))]
    for wrong in ((), (piece, piece), *((other,) for other in moved)):
        with pytest.raises(PlanError, match=r"coverage:|no such rows|a table over keys of several"):
            verify_plan(with_pieces(made.plan, step, work, (*others, *wrong)))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_plans(), st.data())
def test_the_plan_of_another_mask_is_rejected(made: Masked, data: st.DataObject) -> None:
    """The verifier rejects it, also if the masks differ in a single pair."""
    n = made.plan.layout.num_tokens
    other, table = data.draw(masks(n))
    plan = replace(made.plan, mask=other)
    if np.array_equal(table, made.table):
        assert verify_plan(plan).area == np.count_nonzero(table)
    else:
        with pytest.raises(PlanError, match="coverage:"):
            verify_plan(plan)
    almost = made.table.copy()
    almost[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))] ^= True
    with pytest.raises(PlanError, match="coverage:"):
        verify_plan(replace(made.plan, mask=function_mask(n, lambda q, k: almost[q, k])))


# Executed.


@st.composite
def masked_calls(draw: st.DrawFn) -> Case:
    """Calls with any mask, documents and window together, under any plan, also with Ulysses."""
    n, ring = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    q, k = tokens(n)
    mask, table = draw(st.one_of(st.just((None, k <= q)), masks(n)))
    row = draw(st.one_of(st.just(Documents.one(n)), rows_of(n)))
    window = draw(st.one_of(st.none(), st.integers(1, n + 2)))
    table = table & seen(row) & (distances(row) < (window or n))
    name, layout = draw(st.sampled_from([("auto", None), *NAMED]))
    config = LongContextConfig(
        ulysses_degree=draw(st.sampled_from([1, 1, 2])),
        ring_degree=ring,
        plan=name,
        layout=layout,
        ranks_per_node=ring if name == "double_ring" else None,
    )
    heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    softcap = draw(st.sampled_from([None, None, 2.0]))
    masked = MaskedCase("any", row, window, mask, table)
    return Case(config, masked, heads, sinks=draw(st.booleans()), softcap=softcap)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_calls())
def test_any_mask_under_any_plan_is_exact(call: Case) -> None:
    assert_exact(call)


def test_gathered_tables_whose_keys_lie_on_several_ranks() -> None:
    """The first rank's table has a hole at its last own key, the second rank's at its only own key:
    backward must send the rows of gradients that the plan says all the same."""
    table = np.array([[1, 0, 1], [0, 1, 0], [0, 1, 0]], dtype=np.bool_)
    mask = function_mask(3, lambda q, k: table[q, k])
    config = LongContextConfig(ring_degree=2, plan="allgather", layout="contiguous")
    case = MaskedCase("table", Documents.one(3), None, mask, table)
    assert_exact(Case(config, case, (1, 1)))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_ranks_without_tokens_have_sinks_too(num_tokens: int) -> None:
    q, k = tokens(num_tokens)
    case = MaskedCase("short", Documents.one(num_tokens), None, None, k <= q)
    for layout in ("contiguous", "zigzag"):
        config = LongContextConfig(ring_degree=4, layout=layout)
        assert_exact(Case(config, case, (2, 1), sinks=True))
