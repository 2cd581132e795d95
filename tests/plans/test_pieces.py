"""The table of pieces answers for many pairs at once what `slot_pieces` says of each."""

import numpy as np
import pytest

from longctx_patch.plans import EVERYONE, PieceTable, Work
from longctx_patch.plans.pieces import by_owner, slot_pieces
from longctx_patch.sequence.layout import LayoutName, make_layout
from longctx_patch.sequence.masks import causal

SIZES = [(1, 0), (1, 7), (2, 1), (2, 97), (3, 16), (5, 3), (5, 240), (8, 48), (8, 97)]
"""Ranks and tokens."""


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES)
def test_kinds_are_the_pieces_of_each_pair(
    name: LayoutName, num_ranks: int, num_tokens: int
) -> None:
    layout = make_layout(name, num_tokens, ring=num_ranks)
    table = PieceTable(layout, causal(num_tokens))
    q, kv = (x.ravel() for x in np.indices((num_ranks, num_ranks)))
    kinds = table.kinds(q, kv)
    for q_owner, kv_owner, kind in zip(q.tolist(), kv.tolist(), kinds.tolist(), strict=True):
        assert table.of_kind(kind) == slot_pieces(layout, causal(num_tokens), q_owner, kv_owner)
    columns = table.num_rows(table.kv_rows(kinds))
    areas = table.measure(kinds, lambda pieces: sum(piece.area for piece in pieces))
    assert areas.sum() == num_tokens * (num_tokens + 1) // 2
    assert (columns * table.sizes[q] >= areas).all()


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES[1:])
def test_gathered_pieces_are_those_of_all_owners(
    name: LayoutName, num_ranks: int, num_tokens: int
) -> None:
    layout = make_layout(name, num_tokens, ring=num_ranks)
    table = PieceTable(layout, causal(num_tokens))
    for rank, kind in enumerate(table.gathered(np.arange(num_ranks)).tolist()):
        pieces = table.of_kind(kind)
        assert len(pieces) <= 4
        works = by_owner(Work(rank, rank, EVERYONE, pieces), layout)
        for work in works:
            alone = slot_pieces(layout, causal(num_tokens), rank, work.kv_owner)
            assert set(work.pieces) == set(alone)
            assert work.kv_owner == rank or len(work.pieces) == 1  # rounded once
        met = {work.kv_owner for work in works}
        others = set(range(num_ranks)) - met
        assert not any(slot_pieces(layout, causal(num_tokens), rank, other) for other in others)
