import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx_patch.layout import Interval
from longctx_patch.masks import CausalMask

ranges = st.tuples(st.integers(0, 20), st.integers(0, 12))


@given(ranges, ranges, st.integers(1, 4))
def test_pieces_are_the_allowed_pairs_once(
    q_range: tuple[int, int], kv_range: tuple[int, int], step: int
) -> None:
    q, kv = (Interval(start, start + size, step) for start, size in (q_range, kv_range))
    mask = CausalMask()
    allowed = torch.arange(*q)[:, None] >= torch.arange(*kv)[None]
    covered = torch.zeros_like(allowed, dtype=torch.int64)
    for piece in mask.pieces(q, kv):
        rows, columns = slice(*piece.q), slice(*piece.kv)
        block = torch.ones(piece.q.size, piece.kv.size, dtype=torch.int64)
        covered[rows, columns] += block.tril() if piece.causal else block
        assert not piece.causal or piece.q.size == piece.kv.size
    assert torch.equal(covered, allowed.long())
    assert mask.area(q, kv) == int(allowed.sum())
