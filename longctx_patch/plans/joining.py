"""Cut pieces into forms that kernels compute, and join pieces that one call can compute.

The pieces of a plan are full rectangles, causal squares, anticausal squares (row `i` sees the
columns from `i` on), bands with two bounds (a window), and tables. For kernels without windows,
`kernels.lowering` cuts bands further.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import ANTICAUSAL, CAUSAL, FULL, Piece, Tile


def simple_parts(piece: Piece) -> list[Piece]:
    """Cut a band with one bound into a square on the diagonal and rectangles; keep other pieces."""
    if isinstance(piece.rule, Tile):
        return [piece]
    low, high = piece.rule
    if high == 0 and low is None and piece.q.stop - piece.q.start == piece.kv.stop - piece.kv.start:
        return [piece]  # a whole document: the most common
    if low is None and high is not None:
        parts = _below(piece, high)
    elif low is not None and high is None:
        parts = _above(piece, low)
    else:
        return [piece]
    return [part for part in parts if part.q.size and part.kv.size]


def _below(piece: Piece, high: int) -> tuple[Piece, ...]:
    """Cut a piece whose row `i` sees the columns up to `i + high`."""
    (q_start, q_stop, _), (kv_start, kv_stop, _) = piece.q, piece.kv
    diagonal = kv_start + high
    row = q_start + kv_stop - diagonal  # sees all columns, as do those after it
    square = Interval(diagonal, kv_stop)
    return (
        Piece(piece.q, Interval(kv_start, diagonal), FULL),
        Piece(Interval(q_start, row), square, CAUSAL),
        Piece(Interval(row, q_stop), square, FULL),
    )


def _above(piece: Piece, low: int) -> tuple[Piece, ...]:
    """Cut a piece whose row `i` sees the columns from `i + low` on."""
    (q_start, q_stop, _), (kv_start, kv_stop, _) = piece.q, piece.kv
    row = q_start - low
    column = kv_start + q_stop - row
    return (
        Piece(Interval(q_start, row), piece.kv, FULL),
        Piece(Interval(row, q_stop), Interval(kv_start, column), ANTICAUSAL),
        Piece(Interval(row, q_stop), Interval(column, kv_stop), FULL),
    )


def join_pieces(pieces: Iterable[Piece], *, cut_columns: bool = False) -> tuple[Piece, ...]:
    """Join rectangles that touch and causal squares on one diagonal; in order of their rows.

    `cut_columns`: first cut rectangles where others begin or end, so that more of them see the same
    columns, and rows that do are joined.
    """
    pieces = list(pieces)
    full = [piece for piece in pieces if piece.rule == FULL]
    squares = [piece for piece in pieces if piece.rule == CAUSAL]
    others = [piece for piece in pieces if piece.rule not in (FULL, CAUSAL)]
    if cut_columns:
        edges = sorted({edge for piece in pieces for edge in piece.kv[:2]})
        full = [part for piece in full for part in _cut_at(piece, edges)]
    while True:
        before = len(full) + len(squares)
        full = _join_columns(_join_rows(full))
        full, squares = _join_triangles(full, squares)
        if len(full) + len(squares) == before:
            return tuple(sorted([*full, *squares, *others], key=lambda piece: piece[:2]))


def _cut_at(piece: Piece, edges: list[int]) -> list[Piece]:
    """Cut a rectangle at the edges inside its columns."""
    start, stop, _ = piece.kv
    inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
    cuts = [start, *inner, stop]
    return [Piece(piece.q, Interval(*cut), FULL) for cut in pairwise(cuts)]


def _join_rows(full: list[Piece]) -> list[Piece]:
    """Join rectangles of the same columns that lie one below the other."""
    joined: list[Piece] = []
    for piece in sorted(full, key=lambda piece: (piece.kv, piece.q)):
        above = joined[-1] if joined else None
        if above and above.kv == piece.kv and above.q.stop == piece.q.start:
            joined[-1] = Piece(Interval(above.q.start, piece.q.stop), piece.kv, FULL)
        else:
            joined.append(piece)
    return joined


def _join_columns(full: list[Piece]) -> list[Piece]:
    """Join rectangles of the same rows that lie side by side."""
    joined: list[Piece] = []
    for piece in sorted(full):
        left = joined[-1] if joined else None
        if left and left.q == piece.q and left.kv.stop == piece.kv.start:
            joined[-1] = Piece(piece.q, Interval(left.kv.start, piece.kv.stop), FULL)
        else:
            joined.append(piece)
    return joined


def _join_triangles(full: list[Piece], squares: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Join two causal squares on one diagonal, and the rectangle between them, to one square."""
    between = {piece[:2] for piece in full}
    joined: list[Piece] = []
    for piece in sorted(squares, key=lambda piece: piece[:2]):
        above = joined[-1] if joined else None
        if (
            above
            and (above.q.stop, above.kv.stop) == (piece.q.start, piece.kv.start)
            and (piece.q, above.kv) in between
        ):
            between.remove((piece.q, above.kv))
            q, kv = (Interval(a.start, b.stop) for a, b in zip(above[:2], piece[:2], strict=True))
            joined[-1] = Piece(q, kv, CAUSAL)
        else:
            joined.append(piece)
    return [piece for piece in full if piece[:2] in between], joined
