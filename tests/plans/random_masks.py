"""Random masks, each with its table by definition, and plans under them on random layouts."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from longctx_patch.plans import Direction, Plan, Work, make_schedule
from longctx_patch.plans.generators.table import PLANS, plan_for
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval, Layout
from longctx_patch.sequence.masks import (
    Mask,
    block_sparse,
    documents_mask,
    function_mask,
    prefix_lm,
    within,
)
from longctx_patch.sequence.placement import place
from tests.masked import Table, distances, seen

Made = tuple[Mask, Table]
MOST_TOKENS = 40


# Masks.


def tokens(num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Queries as a column, keys as a row."""
    every = np.arange(num_tokens)
    return every[:, None], every[None, :]


@st.composite
def rows_of(draw: st.DrawFn, num_tokens: int) -> Documents:
    """Documents, some of them branches, and padding that fill a row."""
    cuts = draw(st.sets(st.integers(1, max(1, num_tokens)), max_size=7))
    edges = [0, *sorted(cut for cut in cuts if cut <= num_tokens)]
    parents = [draw(st.integers(-1, number - 1)) for number in range(len(edges) - 1)]
    chosen = draw(st.sampled_from([(), tuple(parents)]))
    return Documents(tuple(np.diff(edges).tolist()), num_tokens, chosen)


@st.composite
def random_tables(draw: st.DrawFn, size: int) -> Table:
    """Random tables, from mostly empty to mostly full."""
    seed, density = draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return np.random.default_rng(seed).random((size, size)) < density


@st.composite
def simple_masks(draw: st.DrawFn, n: int) -> Made:
    q, k = tokens(n)
    kind = draw(
        st.sampled_from(["documents", "window", "within", "both ways", "prefix", "blocks", "any"])
    )
    if kind in ("documents", "window", "within", "both ways"):
        row = draw(rows_of(n))
        inside, further = seen(row), distances(row)
        window = draw(st.integers(1, n + 2))
        if kind == "documents":
            return documents_mask(row), inside & (k <= q)
        if kind == "window":
            return documents_mask(row, window=window), inside & (k <= q) & (further < window)
        if kind == "within":
            return within(row, window), inside & (further < window)
        return documents_mask(row, is_causal=False), inside
    if kind == "prefix":
        prefix = draw(st.integers(0, n))
        return prefix_lm(n, prefix), (k <= q) | (k < prefix)
    size = draw(st.integers(1, 9))
    if kind == "any":
        table = draw(random_tables(n))
        return function_mask(n, lambda q, k: table[q, k], block_size=size), table
    blocks = draw(random_tables(-(-n // size)))
    is_causal = draw(st.booleans())
    table = blocks[q // size, k // size]
    made = block_sparse(n, blocks, size, is_causal=is_causal)
    return made, table & (k <= q) if is_causal else table


@st.composite
def masks(draw: st.DrawFn, n: int) -> Made:
    """One mask, or the intersection of several."""
    mask, table = draw(simple_masks(n))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        other, other_table = draw(simple_masks(n))
        mask, table = mask & other, table & other_table
    return mask, table


# Plans.


@st.composite
def any_layouts(draw: st.DrawFn, n: int, num_ranks: int) -> Layout:
    """Layouts of any runs of tokens in any order on any ranks; ranks may be empty."""
    row = draw(rows_of(n))
    edges = [*row.edges, n] if row.edges[-1] < n else [*row.edges]
    runs = [Interval(a, b) for a, b in pairwise(edges)]
    ranks: list[list[Interval]] = [[] for _ in range(num_ranks)]
    for run in draw(st.permutations(runs)):
        ranks[draw(st.integers(0, num_ranks - 1))].append(run)
    return Layout(tuple(map(tuple, ranks)))


NAMED = [(plan, layout) for plan, record in PLANS.items() for layout in record.layouts]
FOR_ANY_LAYOUT = ("halo", "ring", "allgather", "burst")


class Masked(NamedTuple):
    plan: Plan
    table: Table


def make_plan(
    name: str,
    layout: Layout,
    mask: Mask,
    direction: Direction,
    num_kv_heads: int = 2,
    ranks_per_node: int | None = None,
) -> Plan:
    made = make_schedule(
        plan_for(name, direction, "zigzag"),
        direction,
        layout,
        mask,
        num_kv_heads=num_kv_heads,
        ranks_per_node=ranks_per_node if name == "double_ring" else None,
    )
    return made.plan()


@st.composite
def masked_plans(draw: st.DrawFn) -> Masked:
    """Any mask under any plan on a layout made for it, or on any layout if the plan takes it."""
    n, num_ranks = draw(st.integers(1, MOST_TOKENS)), draw(st.integers(1, 6))
    mask, table = draw(masks(n))
    direction = draw(st.sampled_from(Direction))
    if draw(st.integers(0, 3)) == 0:
        layout = draw(any_layouts(n, num_ranks))
        return Masked(
            make_plan(draw(st.sampled_from(FOR_ANY_LAYOUT)), layout, mask, direction), table
        )
    name, placement = draw(st.sampled_from(NAMED))
    layout = place(placement, draw(rows_of(n)), ring=num_ranks)
    per_node = draw(st.sampled_from([d for d in range(1, num_ranks + 1) if num_ranks % d == 0]))
    num_kv_heads = draw(st.integers(1, 5))
    return Masked(make_plan(name, layout, mask, direction, num_kv_heads, per_node), table)


def works_of(plan: Plan) -> Iterator[Work]:
    return (work for step in plan.steps for work in step.works)


def areas(plan: Plan) -> list[int]:
    """The number of pairs of one group of heads that each rank computes."""
    computed = [0] * plan.num_ranks
    for work in works_of(plan):
        if work.heads.part == 0:
            computed[work.rank] += sum(piece.area for piece in work.pieces)
    return computed
