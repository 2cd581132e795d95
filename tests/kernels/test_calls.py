"""Calls compute every pair of the pieces once, for every set of traits of a kernel."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longctx_patch.kernels import Call, Traits, Window, calls_of
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.masks import documents_mask, function_mask
from longctx_patch.sequence.regions import ANTICAUSAL, CAUSAL, Band, Piece, Tile
from tests.counting import count_calls
from tests.kernels.dense import table_of

ALL_TRAITS = [
    Traits(segments, windows, tiles=True, softcap=False)
    for segments, windows in product([False, True], repeat=2)
]
PLAIN, SEGMENTS, WINDOWS, BOTH = ALL_TRAITS


@st.composite
def bands(draw: st.DrawFn) -> Piece:
    """A piece of any band, cut to the rows and columns that the band uses."""
    rows, columns = draw(st.integers(1, 14)), draw(st.integers(1, 14))
    bound = st.none() | st.integers(-16, 16)
    band = Band(draw(bound), draw(bound))
    row, column = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    whole = Piece(Interval(0, rows), Interval(0, columns), band)
    part = whole.at(whole.q, whole.kv)
    return (part or Piece(whole.q, whole.kv)).moved(row, column)


@st.composite
def tiles(draw: st.DrawFn) -> Piece:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    bits = np.array(draw(st.lists(st.booleans(), min_size=36, max_size=36))).reshape(6, 6)
    bits = bits[:rows, :columns]
    whole = Piece(Interval(0, rows), Interval(0, columns), Tile(bits))
    part = whole.at(whole.q, whole.kv) or Piece(whole.q, whole.kv)
    return part.moved(draw(st.integers(0, 9)), draw(st.integers(0, 9)))


def packed(lengths: list[int]) -> Documents:
    return Documents(tuple(lengths), sum(lengths))


def beside_each_other(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The pieces moved to columns of their own; they keep their rows, which may overlap."""
    moved, column = [], 0
    for piece in pieces:
        moved.append(piece.moved(0, column))
        column += piece.kv.stop
    return tuple(moved)


def counts(calls: tuple[Call, ...], size: tuple[int, int]) -> NDArray[np.int64]:
    """How often the calls compute each pair."""
    found = np.zeros(size, dtype=np.int64)
    for call in calls:
        table = table_of(call.segments).numpy()
        if call.flipped:  # segments are equally large and stay where they are
            table = in_place(call, table)
        rows = np.concatenate([np.arange(*i) for i in call.q])
        columns = np.concatenate([np.arange(*i) for i in call.kv])
        np.add.at(found, (rows[:, None], columns[None, :]), table)
    return found


def in_place(call: Call, table: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The table with each segment's square flipped in rows and columns."""
    found, row, column = np.zeros_like(table), 0, 0
    for n, m in zip(call.segments.q, call.segments.kv, strict=True):
        square = table[row : row + n, column : column + m]
        found[row : row + n, column : column + m] = square[::-1, ::-1]
        row, column = row + n, column + m
    return found


def wanted(pieces: tuple[Piece, ...], size: tuple[int, int]) -> NDArray[np.int64]:
    found = np.zeros(size, dtype=np.int64)
    for piece in pieces:
        found[slice(*piece.q), slice(*piece.kv)] += piece.bits()
    return found


def check_form(call: Call, traits: Traits) -> None:
    """Assert what the interface of kernels promises of a call."""
    lengths_q, lengths_kv, rule = call.segments
    assert lengths_q == tuple(i.size for i in call.q)
    assert lengths_kv == tuple(i.size for i in call.kv)
    assert all(a.stop <= b.start for a, b in zip(call.q, call.q[1:], strict=False))
    assert table_of(call.segments).any(dim=1).all(), "every row sees something"
    if not traits.segments or isinstance(rule, Tile):
        assert len({*zip(lengths_q, lengths_kv, strict=True)}) == 1
    if isinstance(rule, Tile) or rule == FULL_WINDOW:
        return
    pairs = list(zip(lengths_q, lengths_kv, strict=True))
    if not traits.windows:
        assert rule == CAUSAL_WINDOW
        assert all(n == m for n, m in pairs)
        return
    assert not call.flipped
    assert min(rule.left or 0, rule.right or 0) >= 0
    assert all(n <= m for n, m in pairs), "FlashAttention's bounds fail with more rows than columns"


@pytest.mark.parametrize("traits", ALL_TRAITS)
@given(pieces=st.lists(bands() | tiles(), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_each_pair_is_computed_once(traits: Traits, pieces: list[Piece]) -> None:
    apart = beside_each_other(pieces)
    size = max(p.q.stop for p in apart), max(p.kv.stop for p in apart)
    calls = calls_of(apart, traits)
    assert (counts(calls, size) == wanted(apart, size)).all()
    for call in calls:
        check_form(call, traits)


def piece(rows: int, columns: int, low: int | None, high: int | None) -> Piece:
    return Piece(Interval(0, rows), Interval(0, columns), Band(low, high))


def test_documents_of_one_rule_share_a_call() -> None:
    documents = documents_mask(packed([5, 1, 9, 2]))
    (call,) = calls_of(documents.regions, BOTH)
    assert call.segments == ((5, 1, 9, 2), (5, 1, 9, 2), CAUSAL_WINDOW)
    short_and_long = documents_mask(packed([5, 1, 9, 2]), window=4)
    (call,) = calls_of(short_and_long.regions, BOTH)
    assert call.segments == ((5, 1, 9, 2), (5, 1, 9, 2), Window(3, 0))


def test_equal_documents_share_a_call_of_one_segment() -> None:
    documents = documents_mask(packed([4, 3, 4, 4, 3]))
    fours, threes = calls_of(documents.regions, PLAIN)
    assert fours.segments == ((4, 4, 4), (4, 4, 4), CAUSAL_WINDOW)
    assert threes.q == (Interval(4, 7), Interval(15, 18))


def test_a_lowered_window_is_two_calls_and_what_is_left() -> None:
    """A band of 17 rows becomes triangles of 5, and triangles and a rectangle for the last 2."""
    calls = calls_of((piece(17, 17, -5, 0),), PLAIN)
    found = {(call.segments, call.flipped) for call in calls}
    assert found == {
        (((5, 5, 5), (5, 5, 5), CAUSAL_WINDOW), False),
        (((5, 5), (5, 5), CAUSAL_WINDOW), True),
        (((2,), (2,), CAUSAL_WINDOW), False),
        (((2,), (2,), CAUSAL_WINDOW), True),
        (((2,), (3,), FULL_WINDOW), False),
    }


def test_equal_tiles_share_a_call() -> None:
    mask = function_mask(12, lambda q, k: (q // 4 == k // 4) & ((q + k) % 3 > 0), block_size=4)
    assert len(mask.regions) == 3
    table = Tile(np.eye(3, dtype=np.bool_))
    pieces = tuple(Piece(Interval(n, n + 3), Interval(n, n + 3), table) for n in (0, 3, 9))
    (call,) = calls_of(pieces, BOTH)
    assert call.segments == ((3, 3, 3), (3, 3, 3), table)


def test_tables_need_a_kernel_that_takes_them() -> None:
    table = Piece(Interval(0, 2), Interval(0, 2), Tile(np.eye(2, dtype=np.bool_)))
    with pytest.raises(AssertionError, match="must refuse tables"):
        calls_of((table,), PLAIN._replace(tiles=False))


@pytest.mark.parametrize("traits", [PLAIN, BOTH])
def test_loose_pieces_are_our_own_mistake(traits: Traits) -> None:
    for loose in (piece(6, 7, 1, 1), piece(7, 6, -9, -1), piece(3, 9, None, 2)):
        with pytest.raises(AssertionError, match="at their edges without a pair"):
            calls_of((loose,), traits)


def test_plain_causal_squares_stay_whole() -> None:
    (call,) = calls_of((Piece(Interval(2, 6), Interval(2, 6), CAUSAL),), PLAIN)
    assert call == ((Interval(2, 6),), (Interval(2, 6),), ((4,), (4,), CAUSAL_WINDOW), False)
    (call,) = calls_of((Piece(Interval(2, 6), Interval(2, 6), ANTICAUSAL),), PLAIN)
    assert call.flipped


@pytest.mark.parametrize("traits", ALL_TRAITS)
def test_work_grows_with_the_documents_and_not_with_their_pairs(traits: Traits) -> None:
    """Four times the documents take four times the work; a search over pairs would take 16."""
    few, many = (
        documents_mask(packed([100 + n % 37 for n in range(count)]), window=64).regions
        for count in (148, 592)
    )
    work = count_calls(lambda: calls_of(few, traits)), count_calls(lambda: calls_of(many, traits))
    assert len(few) < work[0] < work[1] < 4.4 * work[0]
