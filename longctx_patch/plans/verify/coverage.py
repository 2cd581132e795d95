"""Prove that every allowed (query, key) pair of every head is computed exactly once."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from longctx_patch.plans.pieces import by_owner
from longctx_patch.plans.types import Plan, Share
from longctx_patch.sequence.regions import Piece, intersect

PiecesOfPairs = Mapping[tuple[int, int], list[Piece]]


def check_coverage(plan: Plan) -> list[str]:
    """Complaints about pieces that the mask forbids, that overlap, or that leave pairs out."""
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
        if mine not in checked:  # usually all groups of heads compute the same
            of = f"heads {heads.part} of {heads.parts}: " if heads.parts > 1 else ""
            complaints += [f"coverage: {of}{why}" for why in _check_pairs(plan, mine)]
            checked.append(mine)
    return complaints


def _check_pairs(plan: Plan, pieces: PiecesOfPairs) -> list[str]:
    complaints = []
    for (q_owner, kv_owner), here in pieces.items():
        where = f"queries of rank {q_owner}, keys of rank {kv_owner}"
        complaints += [
            f"{where}: {piece} is not allowed by the mask"
            for piece in here
            if _allowed_area(plan, piece, q_owner, kv_owner) != piece.area
        ]
        complaints += [f"{where}: {a} and {b} overlap" for a, b in _overlapping(here)]
    # The computed pairs are allowed and distinct: if they are as many as allowed, none is missing.
    computed = sum(piece.area for here in pieces.values() for piece in here)
    if computed != plan.mask.area:
        complaints.append(f"{computed} pairs computed of {plan.mask.area} allowed, namely")
        complaints += _compare_areas(plan, pieces)
    return complaints


def _compare_areas(plan: Plan, pieces: PiecesOfPairs) -> list[str]:
    complaints = []
    for q_owner, kv_owner in product(range(plan.num_ranks), repeat=2):
        computed = sum(piece.area for piece in pieces.get((q_owner, kv_owner), ()))
        wanted = sum(
            piece.area
            for q in plan.layout.intervals[q_owner]
            for kv in plan.layout.intervals[kv_owner]
            for piece in plan.mask.pieces(q, kv)
        )
        if computed != wanted:
            complaints.append(
                f"queries of rank {q_owner}, keys of rank {kv_owner}: {computed} pairs computed of "
                f"{wanted} allowed"
            )
    return complaints


def _allowed_area(plan: Plan, piece: Piece, q_owner: int, kv_owner: int) -> int:
    """The number of pairs of a piece (in slots) that the mask allows."""
    rows = plan.layout.tokens_in(q_owner, piece.q)
    columns = plan.layout.tokens_in(kv_owner, piece.kv)
    if len(rows) == len(columns) == 1 and plan.mask.has_region(
        Piece(rows[0][0], columns[0][0], piece.rule)
    ):
        return piece.area  # so for most documents of a long row, which are on one rank
    return sum(
        plan.mask.area_in(q_tokens, kv_tokens, part)
        for q_tokens, q_slots in rows
        for kv_tokens, kv_slots in columns
        if (part := piece.at(q_slots, kv_slots)) is not None
    )


def _overlapping(pieces: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """Pairs of pieces that share (query, key) pairs."""
    edges = np.array([(*piece.q[:2], *piece.kv[:2]) for piece in pieces])
    found = []
    for index, piece in enumerate(pieces):
        q_start, q_stop, kv_start, kv_stop = edges[index + 1 :].T
        meet = (q_start < piece.q.stop) & (piece.q.start < q_stop)
        meet &= (kv_start < piece.kv.stop) & (piece.kv.start < kv_stop)
        others = (pieces[index + 1 + i] for i in np.flatnonzero(meet).tolist())
        found += [(piece, other) for other in others if intersect(piece, other)]
    return found
