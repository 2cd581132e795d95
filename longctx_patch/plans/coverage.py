"""Every allowed (query, key) pair of every head is computed exactly once."""

from collections.abc import Mapping
from itertools import pairwise

from longctx_patch.layout import Interval, Layout, slots_of
from longctx_patch.masks import Mask, Piece
from longctx_patch.plans.gathered import by_owner
from longctx_patch.plans.types import Plan, Share


def check_coverage(plan: Plan) -> list[str]:
    """Every allowed pair of every head once: pieces are allowed, disjoint, and as large."""
    pieces: dict[Share, dict[tuple[int, int], list[Piece]]] = {}
    for work in (part for s in plan.steps for w in s.works for part in by_owner(w, plan.layout)):
        of_pair = pieces.setdefault(work.heads, {}).setdefault((work.q_owner, work.kv_owner), [])
        of_pair.extend(work.pieces)
    parts = max((heads.parts for heads in pieces), default=1)
    wanted = {Share(part, parts) for part in range(parts)}
    if pieces and set(pieces) != wanted:
        return [f"coverage: heads {sorted(pieces)} computed of {sorted(wanted)}"]
    complaints, checked = [], []
    for heads in sorted(wanted):
        mine = pieces.get(heads, {})
        if mine not in checked:  # mostly all groups of heads compute the same
            complaints += _check_pairs(plan, heads, mine)
            checked.append(mine)
    return complaints


def _check_pairs(
    plan: Plan, heads: Share, pieces: Mapping[tuple[int, int], list[Piece]]
) -> list[str]:
    complaints = []
    for q_owner in range(plan.num_ranks):
        for kv_owner in range(plan.num_ranks):
            here = pieces.get((q_owner, kv_owner), [])
            where = f"coverage: queries of rank {q_owner}, keys of rank {kv_owner}"
            if heads.parts > 1:
                where += f", heads {heads.part} of {heads.parts}"
            complaints += [
                f"{where}: {piece} is not allowed by the mask"
                for piece in here
                if not _is_allowed(piece, plan.layout, plan.mask, q_owner, kv_owner)
            ]
            complaints += [
                f"{where}: {a} and {b} overlap"
                for i, a in enumerate(here)
                for b in here[i + 1 :]
                if a.q.intersect(b.q).size and a.kv.intersect(b.kv).size
            ]
            wanted = _allowed_area(plan.layout, plan.mask, q_owner, kv_owner)
            computed = sum(piece.area for piece in here)
            if computed != wanted:
                complaints.append(f"{where}: {computed} pairs computed of {wanted} allowed")
    return complaints


def _allowed_area(layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> int:
    return sum(
        mask.area(q, kv) for q in layout.intervals[q_owner] for kv in layout.intervals[kv_owner]
    )


def _is_allowed(piece: Piece, layout: Layout, mask: Mask, q_owner: int, kv_owner: int) -> bool:
    """Cut the piece where its tokens are not contiguous and ask the mask about each part."""
    q_pairs, kv_pairs = slots_of(layout.intervals[q_owner]), slots_of(layout.intervals[kv_owner])
    rows = _cut_points(piece.q, q_pairs)
    columns = _cut_points(piece.kv, kv_pairs)
    if piece.causal:
        rows = columns = sorted({*rows, *columns})
    for row in (Interval(a, b) for a, b in pairwise(rows)):
        for column in (Interval(a, b) for a, b in pairwise(columns)):
            if piece.causal and column.start > row.start:
                continue
            q = _tokens(row.shift(piece.q.start), q_pairs)
            kv = _tokens(column.shift(piece.kv.start), kv_pairs)
            if q is None or kv is None:
                return False
            if piece.causal and column == row:
                square = Interval(0, row.size)
                if mask.pieces(q, kv) != (Piece(square, square, causal=True),):
                    return False
            elif mask.area(q, kv) != q.size * kv.size:
                return False
    return True


def _cut_points(rows: Interval, pairs: list[tuple[Interval, Interval]]) -> list[int]:
    """Edges of the runs of contiguous tokens inside `rows`, relative to its start."""
    edges = {edge for _, slots in pairs for edge in slots[:2]}
    inner = {edge - rows.start for edge in edges if rows.start < edge < rows.stop}
    return sorted({0, rows.size} | inner)


def _tokens(rows: Interval, pairs: list[tuple[Interval, Interval]]) -> Interval | None:
    for tokens, slots in pairs:
        if slots.start <= rows.start and rows.stop <= slots.stop:
            return tokens.part(rows.shift(-slots.start))
    return None
