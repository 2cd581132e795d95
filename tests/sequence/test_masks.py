"""Masks equal the dense table that follows from their definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import (
    Mask,
    bidirectional,
    block_sparse,
    causal,
    documents_mask,
    function_mask,
    prefix_lm,
)
from longctx_patch.sequence.regions import Piece, Tile
from tests.masked import Table, distances, texts_of
from tests.plans.random_masks import masks, rows_of, tokens

MADE = st.integers(1, 36).flatmap(masks)
"""A mask, or the intersection of several, and its table by definition."""


def table_of(pieces: list[Piece], shape: tuple[int, ...]) -> Table:
    """The table of the pieces' pairs; no pair may be in two pieces."""
    table = np.zeros(shape, dtype=np.bool_)
    for piece in pieces:
        bits, part = piece.bits(), table[slice(*piece.q), slice(*piece.kv)]
        assert piece.area == np.count_nonzero(bits) > 0
        if not isinstance(piece.rule, Tile):  # every row and column of a band is used
            assert bits.any(axis=0).all(), piece
            assert bits.any(axis=1).all(), piece
        assert not (part & bits).any()
        part |= bits
    return table


intervals = st.tuples(st.integers(0, 25), st.integers(0, 12), st.integers(1, 4))


@settings(max_examples=300, deadline=None)
@given(MADE, intervals, intervals)
def test_a_mask_is_its_table_wherever_it_is_cut(
    made: tuple[Mask, Table], q_of: tuple[int, int, int], kv_of: tuple[int, int, int]
) -> None:
    mask, table = made
    assert np.array_equal(table_of(list(mask.regions), table.shape), table)
    assert mask.area == np.count_nonzero(table)
    assert np.array_equal(mask.dense(), table)
    q, k = tokens(mask.num_tokens)
    assert np.array_equal(table, k <= q) or not mask.is_causal
    assert mask.sees_ahead == bool((table & (k > q)).any())
    step = q_of[2]
    most = mask.num_tokens
    q_cut, kv_cut = (Interval(min(a, most), min(a + n, most), step) for a, n, _ in (q_of, kv_of))
    part = table[slice(*q_cut), slice(*kv_cut)]
    pieces = mask.pieces(q_cut, kv_cut)
    assert np.array_equal(table_of(pieces, part.shape), part)
    assert sum(mask.area_in(q_cut, kv_cut, piece) for piece in pieces) == np.count_nonzero(part)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 36).flatmap(rows_of), st.integers(1, 20))
def test_a_branch_sees_what_its_row_would_and_no_sibling(row: Documents, window: int) -> None:
    """By the texts of tokens in rows apart: neither parents nor shifts of bands are trusted."""
    texts, (q, k) = texts_of(row), tokens(row.num_tokens)
    table = (k <= q) & [[bool(key) and query.startswith(key) for key in texts] for query in texts]
    assert np.array_equal(documents_mask(row).dense(), table)
    assert np.array_equal(
        documents_mask(row, window=window).dense(), table & (distances(row) < window)
    )
    real = row.edges[-1]
    positions = row.positions(torch.arange(row.num_tokens))[:real]
    assert positions.tolist() == [len(text) - 1 for text in texts[:real]]
    assert row.longest == max(map(len, texts))


def test_rows_with_other_parents_are_other_rows() -> None:
    rows = [Documents((4, 2, 2), 9, parents) for parents in ((), (-1, 0, 0), (-1, 0, 1))]
    assert len({hash(row) for row in rows}) == len(set(rows)) == 3
    assert len({documents_mask(row).checksum for row in rows}) == 3


def test_equal_masks_by_other_ways_have_one_checksum() -> None:
    assert causal(12) == documents_mask(Documents.one(12), window=40) != bidirectional(12)
    assert causal(12).checksum == documents_mask(Documents.one(12), window=12).checksum
    assert len({m.checksum for m in (causal(12), bidirectional(12), causal(13))}) == 3
    blocks = np.eye(3, dtype=bool)
    both = [bidirectional(12) & block_sparse(12, blocks, 4) for _ in range(2)]
    assert both[0] == both[1]
    assert both[0].checksum == both[1].checksum
    one = function_mask(6, lambda q, k: (q + k) % 3 == 0)
    assert one.checksum != function_mask(6, lambda q, k: (q + k + 1) % 3 == 0).checksum


def test_thousands_of_tokens_take_closed_forms() -> None:
    mask = documents_mask(Documents.one(2**40), window=4096)
    assert mask.area == 4096 * 2**40 - 4096 * 4095 // 2
    assert len(mask.regions) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: documents_mask(Documents.one(4), window=0), "window=0"),
        (lambda: documents_mask(Documents.one(4), window=2, is_causal=False), "looks back"),
        (lambda: Documents((3, 0), 5), "a token or more"),
        (lambda: Documents((3, 3), 5), "together they fit"),
        (lambda: Documents((3, 2), 5, (-1, 1)), "an earlier document or -1"),
        (lambda: Documents((3, 2), 5, (0,)), "an earlier document or -1"),
        (lambda: Documents((3, 2), 5, (-1, 0)).cut(2), "chunk=2 of documents that go on"),
        (lambda: prefix_lm(4, 5), "prefix=5"),
        (lambda: block_sparse(10, np.ones((2, 2), dtype=bool), 4), r"\[3, 3\]"),
        (lambda: causal(4) & causal(5), "4 and 5 tokens"),
    ],
)
def test_bad_masks(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        make()
