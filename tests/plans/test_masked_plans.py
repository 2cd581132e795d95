"""Plans under masks of every kind, expanded pair by pair; planted faults; what masks save.

What a plan computes is read off its pieces and its layout alone and compared with a table that is
written from the definition of each mask, so the code that cuts masks into pieces is not believed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longctx_patch.config import LAYOUTS_OF_PLAN, LayoutName, LongContextConfig
from longctx_patch.documents import Documents
from longctx_patch.layout import Interval, Layout
from longctx_patch.masks import (
    Mask,
    bidirectional,
    block_sparse,
    causal,
    documents_mask,
    function_mask,
    prefix_lm,
    within,
)
from longctx_patch.placement import place
from longctx_patch.plans import (
    EVERYONE,
    Direction,
    Operand,
    Plan,
    PlanError,
    Share,
    Work,
    make_schedule,
    verify_plan,
)
from longctx_patch.plans.pieces import piece_table
from longctx_patch.regions import Band, Piece, Tile
from tests.masked import Masked as MaskedCase
from tests.test_masked_attention import assert_exact

Table = NDArray[np.bool_]
Made = tuple[Mask, Table]
MOST_TOKENS = 40


# Masks, each with its table by definition.


def tokens(num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Queries as a column, keys as a row."""
    every = np.arange(num_tokens)
    return every[:, None], every[None, :]


def same_document(lengths: Sequence[int], num_tokens: int) -> Table:
    document = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
    inside[: len(document), : len(document)] = document[:, None] == document[None, :]
    return inside


@st.composite
def rows_of(draw: st.DrawFn, num_tokens: int) -> Documents:
    """Documents and padding that fill a row."""
    cuts = draw(st.sets(st.integers(1, max(1, num_tokens)), max_size=7))
    edges = [0, *sorted(cut for cut in cuts if cut <= num_tokens)]
    return Documents(tuple(np.diff(edges).tolist()), num_tokens)


@st.composite
def random_tables(draw: st.DrawFn, size: int) -> Table:
    """Mostly empty, mostly full and in between."""
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
        inside = same_document(row.lengths, n)
        window = draw(st.integers(1, n + 2))
        if kind == "documents":
            return documents_mask(row), inside & (k <= q)
        if kind == "window":
            return documents_mask(row, window=window), inside & (k <= q) & (q - k < window)
        if kind == "within":
            return within(row, window), inside & (q - k < window)
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
    """One mask or what several of them allow together."""
    mask, table = draw(simple_masks(n))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        other, other_table = draw(simple_masks(n))
        mask, table = mask & other, table & other_table
    return mask, table


@st.composite
def any_layouts(draw: st.DrawFn, n: int, num_ranks: int) -> Layout:
    """Any runs of tokens in any order on any ranks, some of which may have none."""
    row = draw(rows_of(n))
    edges = [*row.edges, n] if row.edges[-1] < n else [*row.edges]
    runs = [Interval(a, b) for a, b in pairwise(edges)]
    ranks: list[list[Interval]] = [[] for _ in range(num_ranks)]
    for run in draw(st.permutations(runs)):
        ranks[draw(st.integers(0, num_ranks - 1))].append(run)
    return Layout(tuple(map(tuple, ranks)))


PLANS = [(plan, layout) for plan, layouts in LAYOUTS_OF_PLAN.items() for layout in layouts]
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
        name,
        direction,
        layout,
        mask,
        num_kv_heads=num_kv_heads,
        ranks_per_node=ranks_per_node if name == "double_ring" else None,
    )
    return made.plan()


@st.composite
def masked_plans(draw: st.DrawFn) -> Masked:
    """Any mask under any plan on a layout it is made for; those that can, on any layout too."""
    n, num_ranks = draw(st.integers(1, MOST_TOKENS)), draw(st.integers(1, 6))
    mask, table = draw(masks(n))
    direction = draw(st.sampled_from(Direction))
    if draw(st.integers(0, 3)) == 0:
        layout = draw(any_layouts(n, num_ranks))
        return Masked(
            make_plan(draw(st.sampled_from(FOR_ANY_LAYOUT)), layout, mask, direction), table
        )
    name, placement = draw(st.sampled_from(PLANS))
    layout = place(placement, draw(rows_of(n)), ring=num_ranks)
    per_node = draw(st.sampled_from([d for d in range(1, num_ranks + 1) if num_ranks % d == 0]))
    num_kv_heads = draw(st.integers(1, 5))
    return Masked(make_plan(name, layout, mask, direction, num_kv_heads, per_node), table)


# What a plan computes.


def works_of(plan: Plan) -> Iterator[Work]:
    return (work for step in plan.steps for work in step.works)


def times_computed(plan: Plan) -> dict[Share, NDArray[np.int64]]:
    """By group of heads: how often each (query token, key token) is computed, on any rank."""
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


@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


# Executed.


class Call(NamedTuple):
    """Arguments of `assert_exact`."""

    config: LongContextConfig
    masked: MaskedCase
    heads: tuple[int, int]
    sinks: bool
    softcap: float | None


@st.composite
def masked_calls(draw: st.DrawFn) -> Call:
    """Any mask, documents and window together, under any plan, with and without Ulysses."""
    n, ring = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    q, k = tokens(n)
    mask, table = draw(st.one_of(st.just((None, k <= q)), masks(n)))
    row = draw(st.one_of(st.just(Documents.one(n)), rows_of(n)))
    window = draw(st.one_of(st.none(), st.integers(1, n + 2)))
    table = table & same_document(row.lengths, n) & (q - k < (window or n))
    name, layout = draw(st.sampled_from([("auto", None), *PLANS]))
    config = LongContextConfig(
        ulysses_degree=draw(st.sampled_from([1, 1, 2])),
        ring_degree=ring,
        plan=name,  # type: ignore[arg-type]
        layout=layout,
        ranks_per_node=ring if name == "double_ring" else None,
    )
    heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    softcap = draw(st.sampled_from([None, None, 2.0]))
    masked = MaskedCase("any", row, window, mask, table)
    return Call(config, masked, heads, draw(st.booleans()), softcap)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(masked_calls())
def test_any_mask_under_any_plan_is_exact(call: Call) -> None:
    assert_exact(call.config, call.masked, call.heads, sinks=call.sinks, softcap=call.softcap)


def test_gathered_tables_whose_keys_lie_on_several_ranks() -> None:
    """The first rank's table has a hole at its own last key, the second rank's at its only one:
    what backward sends home must have the rows that the plan says."""
    table = np.array([[1, 0, 1], [0, 1, 0], [0, 1, 0]], dtype=np.bool_)
    mask = function_mask(3, lambda q, k: table[q, k])
    config = LongContextConfig(ring_degree=2, plan="allgather", layout="contiguous")
    case = MaskedCase("table", Documents.one(3), None, mask, table)
    assert_exact(config, case, (1, 1))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_ranks_without_tokens_have_sinks_too(num_tokens: int) -> None:
    q, k = tokens(num_tokens)
    case = MaskedCase("short", Documents.one(num_tokens), None, None, k <= q)
    for layout in ("contiguous", "zigzag"):
        assert_exact(LongContextConfig(ring_degree=4, layout=layout), case, (2, 1), sinks=True)


# Planted faults.


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


ROW = (5, 1, 9, 2, 16)  # and 3 tokens of padding


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("name", "placement"), PLANS)
def test_a_window_or_document_that_is_off_by_one_is_rejected(
    name: str, placement: LayoutName, direction: Direction
) -> None:
    """The whole plan is made for the wrong mask, so it is consistent in itself."""
    row = Documents(ROW, 36)
    layout = place(placement, row, ring=4)

    def plan_of(mask: Mask) -> Plan:
        return make_plan(name, layout, mask, direction, ranks_per_node=2)

    right = documents_mask(row, window=4)
    verify_plan(plan_of(right))
    for window in (3, 5):
        wrong = plan_of(documents_mask(row, window=window))
        with pytest.raises(PlanError, match="coverage:"):
            verify_plan(replace(wrong, mask=right))
    for number in range(len(ROW)):
        lengths = list(ROW)
        lengths[number] += 1
        if number + 1 < len(ROW):
            lengths[number + 1] -= 1
        moved = Documents(tuple(length for length in lengths if length), 36)
        wrong = plan_of(documents_mask(moved, window=4))
        with pytest.raises(PlanError, match="coverage:"):
            verify_plan(replace(wrong, mask=right))


# What masks save.


def rows_sent(plan: Plan, *operands: Operand) -> list[int]:
    """By rank: rows of these operands that it sends."""
    sent = [0] * plan.num_ranks
    for step in plan.steps:
        for transfer in step.transfers:
            if transfer.block.operand in operands:
                sent[transfer.source] += transfer.block.rows.size
    return sent


def areas(plan: Plan) -> list[int]:
    """By rank: pairs that it computes, of one group of heads."""
    computed = [0] * plan.num_ranks
    for work in works_of(plan):
        if work.heads.part == 0:
            computed[work.rank] += sum(piece.area for piece in work.pieces)
    return computed


def tokens_sent(plan: Plan, operand: Operand) -> set[int]:
    """The tokens whose rows leave their rank."""
    held = [plan.layout.positions(rank).tolist() for rank in range(plan.num_ranks)]
    return {
        held[transfer.block.owner][slot]
        for step in plan.steps
        for transfer in step.transfers
        if transfer.block.operand is operand
        for run in transfer.block.rows.runs
        for slot in range(run.start, run.stop)
    }


def halo(layout: Layout, mask: Mask, direction: Direction = Direction.FORWARD) -> Plan:
    plan = make_plan("halo", layout, mask, direction)
    verify_plan(plan)
    return plan


WINDOW = 777


@pytest.mark.parametrize("num_tokens", [2**14, 2**17, 2**20])
def test_a_window_costs_what_is_in_it_whatever_the_length(num_tokens: int) -> None:
    """Each edge between ranks is crossed by the last W - 1 keys before it, and by nothing else."""
    row, before = Documents.one(num_tokens), WINDOW - 1
    mask = documents_mask(row, window=WINDOW)
    area = num_tokens * WINDOW - WINDOW * before // 2
    # A zigzag rank holds two chunks; the fourth rank from the front both sides of the middle.
    edges = {"contiguous": [1] * 7 + [0], "zigzag": [1] + [2] * 6 + [1]}
    for placement, sends in edges.items():
        layout = place(placement, row, ring=8)
        forward, backward = (halo(layout, mask, direction) for direction in Direction)
        wanted = [before * count for count in sends]
        assert rows_sent(forward, Operand.KV) == wanted
        assert rows_sent(backward, Operand.KV) == wanted
        assert rows_sent(forward, *set(Operand) - {Operand.KV}) == [0] * 8
        gradients = rows_sent(backward, Operand.DKV, Operand.DKV_SUM)
        assert sum(gradients) == sum(wanted)
        assert rows_sent(backward, Operand.Q_BACKWARD, Operand.DQ, Operand.DQ_SUM) == [0] * 8
        for plan in (forward, backward):
            assert sum(areas(plan)) == area
            assert max(areas(plan)) * 8 <= area * 1.06


@pytest.mark.parametrize("placement", ["contiguous", "balanced"])
@pytest.mark.parametrize("per_rank", [(64,), (1, 62, 1), (16,) * 4, (7, 50)])
def test_documents_that_end_at_the_edges_of_ranks_send_nothing(
    placement: LayoutName, per_rank: tuple[int, ...]
) -> None:
    share = 64 if sum(per_rank) == 64 else sum(per_rank)
    row = Documents(per_rank * 8, share * 8)
    layout = place(placement, row, ring=8)
    for direction in Direction:
        plan = halo(layout, documents_mask(row), direction)
        assert not [transfer for step in plan.steps for transfer in step.transfers]
        assert len(plan.steps) == 1


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "balanced"])
def test_one_giant_document_sends_its_own_rows_alone(placement: LayoutName) -> None:
    """Tiny documents are cut by no edge of a rank, so they stay at home."""
    tiny, giant = (8,) * 64, 1024 + 512
    row = Documents((*tiny, giant, *tiny), 1024 + giant)
    layout = place(placement, row, ring=4)
    mask = documents_mask(row)
    assert all(
        edge % 8 == 0 for rank in layout.intervals for interval in rank for edge in interval[:2]
    )
    for direction in Direction:
        plan = halo(layout, mask, direction)
        sent = tokens_sent(plan, Operand.KV)
        assert sent
        assert min(sent) >= 512
        assert max(sent) < 512 + giant
        assert sum(rows_sent(plan, Operand.KV)) == needed_rows(mask.dense(), layout)


def needed_rows(table: Table, layout: Layout) -> int:
    """Rows of keys that some query of another rank sees, counted once for each such rank."""
    held = [layout.positions(rank).numpy() for rank in range(layout.num_ranks)]
    return sum(
        int(table[np.ix_(held[rank], held[owner])].any(axis=0).sum())
        for rank, owner in product(range(layout.num_ranks), repeat=2)
        if rank != owner
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("block_size", "density"), [(16, 0.1), (24, 0.3), (7, 0.02)])
def test_empty_blocks_are_neither_sent_nor_computed(
    placement: LayoutName, is_causal: bool, block_size: int, density: float
) -> None:
    n, num_ranks = 512, 4
    count = -(-n // block_size)
    blocks = np.random.default_rng(block_size).random((count, count)) < density
    q, k = tokens(n)
    table = blocks[q // block_size, k // block_size]
    table = table & (k <= q) if is_causal else table
    mask = block_sparse(n, blocks, block_size, is_causal=is_causal)
    layout = place(placement, Documents.one(n), ring=num_ranks)
    for direction in Direction:
        plan = halo(layout, mask, direction)
        assert sum(rows_sent(plan, Operand.KV)) == needed_rows(table, layout)
        assert sum(areas(plan)) == np.count_nonzero(table)


def test_a_table_sends_nothing_outside_its_first_and_last_key() -> None:
    """Blocks of any function are cut down to the rows and columns that are used."""
    n = 64
    mask = function_mask(n, lambda q, k: (q == 40) & ((k == 3) | (k == 5)), block_size=16)
    plan = halo(place("contiguous", Documents.one(n), ring=4), mask)
    assert rows_sent(plan, Operand.KV) == [3, 0, 0, 0]
    assert sum(areas(plan)) == 2


# Balance.


def all_equal(num_tokens: int, seed: int) -> Documents:
    count = (40, 17, 300)[seed]
    return Documents((num_tokens // count,) * count, num_tokens)


def log_normal(num_tokens: int, seed: int) -> Documents:
    random = np.random.default_rng(seed)
    weights = random.lognormal(0.0, 1.5, size=400)
    lengths = np.maximum(1, weights * (num_tokens - 400) / weights.sum()).astype(int)
    return Documents(tuple(lengths.tolist()), num_tokens)


def giant_and_tiny(num_tokens: int, seed: int) -> Documents:
    giant, tiny = int(num_tokens * (0.3, 0.6, 0.9)[seed]), 50
    rest = (num_tokens - giant) // tiny
    before = (0, rest // 3, rest)[seed]
    return Documents((tiny,) * before + (giant,) + (tiny,) * (rest - before), num_tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("make", [all_equal, log_normal, giant_and_tiny])
def test_balanced_ranks_compute_equal_areas(
    make: Callable[[int, int], Documents], num_ranks: int, seed: int
) -> None:
    row = make(131_072, seed)
    layout = place("balanced", row, ring=num_ranks)
    assert max(layout.sizes) == min(layout.sizes)
    for name in ("halo", "allgather"):
        for direction in Direction:
            computed = areas(make_plan(name, layout, documents_mask(row), direction))
            assert sum(computed) == sum(length * (length + 1) // 2 for length in row.lengths)
            assert max(computed) * num_ranks <= 1.05 * sum(computed), (name, direction)


# Time.


def seconds_to_plan(row: Documents, num_ranks: int) -> float:
    """CPU time from the lengths of the documents to both plans, nothing being cached."""
    place.cache_clear()
    piece_table.cache_clear()
    begin = time.process_time()
    fresh = Documents(row.lengths, row.num_tokens)
    layout = place("balanced", fresh, ring=num_ranks)
    mask = documents_mask(fresh)
    for direction in Direction:
        make_plan("halo", layout, mask, direction, num_kv_heads=8)
    return time.process_time() - begin


@pytest.mark.parametrize("seed", range(3))
def test_a_million_tokens_are_planned_in_50_ms(seed: int) -> None:
    weights = np.random.default_rng(seed).lognormal(0.0, 1.0, size=2000)
    lengths = np.maximum(1, weights * (1_048_576 - 2000) / weights.sum()).astype(int)
    row = Documents(tuple(lengths.tolist()), 1_048_576)
    assert min(seconds_to_plan(row, 8) for _ in range(5)) < 0.05


def test_masks_that_allow_nothing_have_plans_that_do_nothing() -> None:
    n = 24
    for mask in (Documents((), n), None):
        nothing = block_sparse(n, np.zeros((3, 3), dtype=bool), 8) if mask is None else None
        made = nothing or documents_mask(mask or Documents((), n))
        for (name, placement), direction in product(PLANS, Direction):
            layout = place(placement, Documents.one(n), ring=4)
            plan = make_plan(name, layout, made, direction, ranks_per_node=2)
            assert verify_plan(plan).area == 0
            assert not list(works_of(plan))


def test_the_two_ends_of_sparsity_are_causal_and_bidirectional() -> None:
    """Masks written in different ways give plans of the same areas and the same bytes."""
    n = 96
    q_blocks = np.arange(12)[:, None] >= np.arange(12)[None, :]
    pairs = [
        (causal(n), block_sparse(n, q_blocks, 8)),
        (bidirectional(n), block_sparse(n, np.ones((12, 12), dtype=bool), 8, is_causal=False)),
        (causal(n), prefix_lm(n, 0)),
        (bidirectional(n), prefix_lm(n, n)),
    ]
    for (one, other), placement in product(pairs, ("contiguous", "zigzag")):
        layout = place(placement, Documents.one(n), ring=4)
        for direction in Direction:
            plans = [halo(layout, mask, direction) for mask in (one, other)]
            assert areas(plans[0]) == areas(plans[1])
            assert rows_sent(plans[0], Operand.KV) == rows_sent(plans[1], Operand.KV)
