"""Plans under masks with a planted fault are rejected: one changed piece, or a whole plan that is
made for another mask."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from longctx_patch.plans import Plan, PlanError, Work, verify_plan
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import function_mask
from longctx_patch.sequence.regions import Band, Piece, Tile
from tests.plans.random_masks import Masked, masked_plans, masks


class Fault(NamedTuple):
    """One changed piece in its place, or none in its place."""

    step: int
    work: int
    piece: int


def pieces_at(plan: Plan) -> list[tuple[Fault, Work, Piece]]:
    return [
        (Fault(s, w, p), work, piece)
        for s, step in enumerate(plan.steps)
        for w, work in enumerate(step.works)
        for p, piece in enumerate(work.pieces)
    ]


def with_piece(plan: Plan, at: Fault, piece: Piece | None) -> Plan:
    """The plan with another piece; a work that has none left is dropped."""
    step = plan.steps[at.step]
    pieces = list(step.works[at.work].pieces)
    pieces[at.piece : at.piece + 1] = [] if piece is None else [piece]
    works = list(step.works)
    works[at.work : at.work + 1] = [works[at.work]._replace(pieces=tuple(pieces))] if pieces else []
    steps = list(plan.steps)
    steps[at.step] = replace(step, works=tuple(works))
    return replace(plan, steps=tuple(steps))


REJECTED = "coverage:|no such rows or columns|is a square|a table over keys of several runs"


def assert_rejected(plan: Plan) -> None:
    with pytest.raises(PlanError, match=REJECTED):
        verify_plan(plan)


def shifted(piece: Piece) -> list[Piece]:
    moves = ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1))
    return [piece.moved(*move) for move in moves]


def resized(piece: Piece) -> list[Piece]:
    """A rectangle with one row or column more or less; bands stay where they start."""
    q, kv, rule = piece
    if isinstance(rule, Tile):
        return []
    changed = [
        Piece(Interval(q.start, q.stop + more), Interval(kv.start, kv.stop + wider), rule)
        for more, wider in ((1, 0), (-1, 0), (0, 1), (0, -1))
    ]
    return [p for p in changed if not p.q.size or not p.kv.size or p.area != piece.area]


def other_bands(piece: Piece) -> list[Piece]:
    """Each bound one further out and one further in."""
    if isinstance(piece.rule, Tile):
        return []
    low, high = piece.rule
    bands = [Band(low + by, high) for by in (-1, 1) if low is not None]
    bands += [Band(low, high + by) for by in (-1, 1) if high is not None]
    changed = [piece._replace(rule=band) for band in bands]
    return [p for p in changed if p.area != piece.area]  # a bound may bind nothing in one token


def other_bits(piece: Piece) -> list[Piece]:
    """One bit set or cleared."""
    if not isinstance(piece.rule, Tile):
        return []
    changed = []
    for at in ((0, 0), (-1, -1), tuple(size // 2 for size in piece.rule.bits.shape)):
        bits = piece.rule.bits.copy()
        bits[at] ^= True
        changed.append(piece._replace(rule=Tile(bits)))
    return changed


FAULTS: list[Callable[[Piece], Sequence[Piece | None]]] = [
    lambda piece: [None],
    shifted,
    resized,
    other_bands,
    other_bits,
]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_plans(), st.randoms(use_true_random=False))
def test_a_fault_in_one_piece_is_rejected(made: Masked, random) -> None:  # type: ignore[no-untyped-def]
    everywhere = pieces_at(made.plan)
    assume(everywhere)
    faults = random.sample(everywhere, min(3, len(everywhere)))
    for (at, _, piece), change in product(faults, FAULTS):
        for other in change(piece):
            assert_rejected(with_piece(made.plan, at, other))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_plans(), st.data())
def test_the_plan_of_another_mask_is_rejected(made: Masked, data: st.DataObject) -> None:
    """Also where the other mask has one pair more or less."""
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
