"""What masks save: rows that are not sent and pairs that are not computed."""

from itertools import product

import numpy as np
import pytest

from longctx_patch.plans import Direction, Operand, Plan, verify_plan
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, LayoutName
from longctx_patch.sequence.masks import (
    Mask,
    block_sparse,
    documents_mask,
    function_mask,
)
from longctx_patch.sequence.placement import place
from tests.plans.random_masks import Table, areas, make_plan, tokens


def rows_sent(plan: Plan, *operands: Operand) -> list[int]:
    """The number of rows of these operands that each rank sends."""
    sent = [0] * plan.num_ranks
    for step in plan.steps:
        for transfer in step.transfers:
            if transfer.block.operand in operands:
                sent[transfer.source] += transfer.block.rows.size
    return sent


def halo(layout: Layout, mask: Mask, direction: Direction = Direction.FORWARD) -> Plan:
    plan = make_plan("halo", layout, mask, direction)
    verify_plan(plan)
    return plan


WINDOW = 777


@pytest.mark.parametrize("num_tokens", [2**14, 2**17, 2**20])
def test_a_window_costs_what_is_in_it_whatever_the_length(num_tokens: int) -> None:
    """Only the last W - 1 keys before an edge between ranks are sent across it."""
    row, before = Documents.one(num_tokens), WINDOW - 1
    mask = documents_mask(row, window=WINDOW)
    area = num_tokens * WINDOW - WINDOW * before // 2
    # A zigzag rank holds two chunks; the last rank holds both sides of the middle of the row.
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
    """Tiny documents lie whole on one rank, so their rows aren't sent."""
    tiny, giant = (8,) * 64, 1024 + 512
    row = Documents((*tiny, giant, *tiny), 1024 + giant)
    layout, mask = place(placement, row, ring=4), documents_mask(row)
    for direction in Direction:
        sent = sum(rows_sent(halo(layout, mask, direction), Operand.KV))
        assert 0 < sent == needed_rows(mask.dense(), layout)


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
    """Blocks of a mask function are trimmed to the rows and columns that have a pair."""
    n = 64
    mask = function_mask(n, lambda q, k: (q == 40) & ((k == 3) | (k == 5)), block_size=16)
    plan = halo(place("contiguous", Documents.one(n), ring=4), mask)
    assert rows_sent(plan, Operand.KV) == [3, 0, 0, 0]
    assert sum(areas(plan)) == 2


def test_what_leaves_one_rank_for_many_does_not_come_home_at_once() -> None:
    """All ranks see one block of the first rank; a step moves a quarter of a shard each way."""
    num_ranks, shard, block = 16, 320, 32
    num_tokens = num_ranks * shard
    blocks = np.eye(num_tokens // block, dtype=bool)
    blocks[:, 0] = True
    layout = place("contiguous", Documents.one(num_tokens), ring=num_ranks)
    mask = block_sparse(num_tokens, blocks, block)
    for direction in Direction:
        for step in halo(layout, mask, direction).steps:
            kv_rows = [t.block.rows.size for t in step.transfers if t.block.operand.is_of_keys]
            assert sum(kv_rows) <= shard / 4 * (1 + (direction is Direction.BACKWARD))
