"""Segments and pieces on which kernels are tried, and larger ones for the tiles of GPU kernels."""

from itertools import pairwise

import numpy as np

from longctx_patch.kernels import Segments, Window
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import ANTICAUSAL, CAUSAL, FULL, Band, Piece, Tile


def tile(rows: int, columns: int) -> Tile:
    """A table in which each row sees something."""
    bits = np.random.default_rng(rows).random((rows, columns)) < 0.3
    bits[np.arange(rows), np.arange(rows) % columns] = True
    return Tile(bits)


SEGMENTS = {
    "full": Segments((7,), (11,), FULL_WINDOW),
    "tall and full": Segments((19,), (3,), FULL_WINDOW),
    "one row of full sight": Segments((1,), (3,), FULL_WINDOW),
    "one column": Segments((3,), (1,), FULL_WINDOW),
    "one pair": Segments((1,), (1,), FULL_WINDOW),
    "causal": Segments((17,), (17,), CAUSAL_WINDOW),
    "causal, more columns": Segments((5,), (17,), CAUSAL_WINDOW),
    "one row": Segments((1,), (17,), CAUSAL_WINDOW),
    "window": Segments((17,), (17,), Window(4, 0)),
    "window, more columns": Segments((9,), (17,), Window(4, 0)),
    "window of one key": Segments((17,), (17,), Window(0, 0)),
    "both sides": Segments((16,), (17,), Window(3, 2)),
    "later only": Segments((17,), (17,), Window(0, None)),
    "later, with left": Segments((9,), (12,), Window(5, None)),
    "documents": Segments((5, 1, 9, 2), (5, 1, 9, 2), CAUSAL_WINDOW),
    "documents of full sight": Segments((5, 1, 9), (2, 7, 4), FULL_WINDOW),
    "documents of unequal sides": Segments((3, 1, 9), (5, 4, 9), CAUSAL_WINDOW),
    "windows of documents": Segments((5, 1, 9, 2), (5, 3, 11, 2), Window(3, 0)),
    "later in documents": Segments((5, 1, 2), (8, 4, 2), Window(1, None)),
    "documents of one token": Segments((1,) * 20, (1,) * 20, FULL_WINDOW),
    "one token of each document": Segments((1,) * 20, (9,) * 20, FULL_WINDOW),
    "many blocks": Segments((150, 1, 140), (150, 30, 200), Window(64, 0)),
    "table": Segments((9,), (13,), tile(9, 13)),
    "table of many blocks": Segments((150,), (300,), tile(150, 300)),
}


def _squares(edges: list[int], band: Band) -> tuple[Piece, ...]:
    """One piece for each document between the edges; a single pair has no band."""
    parts = [Interval(a, b) for a, b in pairwise(edges)]
    return tuple(Piece(part, part, band if part.size > 1 else FULL) for part in parts)


PIECES = {
    "window": (Piece(Interval(3, 40), Interval(0, 37), Band(-5, 0)),),
    "window of one key": (Piece(Interval(0, 6), Interval(2, 8), Band(0, 0)),),
    "two-sided": (Piece(Interval(0, 20), Interval(0, 26), Band(-3, 9)),),
    "more rows than columns": (Piece(Interval(0, 30), Interval(0, 9), Band(-25, 4)),),
    "later, more rows than columns": (Piece(Interval(0, 30), Interval(0, 9), Band(-25, None)),),
    "stairs, more rows than columns": (Piece(Interval(0, 30), Interval(0, 9), Band(None, 2)),),
    "later only": (Piece(Interval(0, 8), Interval(2, 10), ANTICAUSAL),),
    "documents": _squares([0, 7, 8, 15, 24, 31], CAUSAL),
    "anticausal documents": _squares([0, 7, 14, 24, 31], ANTICAUSAL),
    "overlapping rows": (
        Piece(Interval(0, 9), Interval(0, 9), Band(None, 0)),
        Piece(Interval(4, 9), Interval(9, 20), FULL),
        Piece(Interval(0, 9), Interval(20, 31), Band(-4, 4)),
    ),
    "equal tables": tuple(
        Piece(Interval(n, n + 4), Interval(n, n + 5), tile(4, 5)) for n in (0, 4, 12)
    ),
}


def larger_segments(segments: Segments, factor: int) -> Segments:
    """The same kind of case with lengths and bounds times `factor`; 0 and lengths of 1 stay."""
    q, kv = (
        tuple(n if n == 1 else n * factor for n in lengths) for lengths in (segments.q, segments.kv)
    )
    if isinstance(segments.rule, Tile):
        return Segments(q, kv, tile(q[0], kv[0]))
    left, right = (None if bound is None else bound * factor for bound in segments.rule)
    return Segments(q, kv, Window(left, right))


def larger_pieces(pieces: tuple[Piece, ...], factor: int) -> tuple[Piece, ...]:
    """Pieces without tables, with edges and bounds times `factor`."""
    return tuple(_larger(piece, factor) for piece in pieces)


def _larger(piece: Piece, factor: int) -> Piece:
    assert isinstance(piece.rule, Band)
    low, high = (None if bound is None else bound * factor for bound in piece.rule)
    q, kv = (Interval(side.start * factor, side.stop * factor) for side in (piece.q, piece.kv))
    return Piece(q, kv, Band(low, high))
