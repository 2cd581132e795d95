import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx_patch.layout import Interval
from longctx_patch.masks import CausalMask

intervals = st.tuples(st.integers(0, 20), st.integers(0, 12)).map(
    lambda pair: Interval(pair[0], pair[0] + pair[1])
)


@given(intervals, intervals)
def test_pieces_are_the_allowed_pairs_once(q: Interval, kv: Interval) -> None:
    mask = CausalMask()
    allowed = torch.arange(q.start, q.stop)[:, None] >= torch.arange(kv.start, kv.stop)[None]
    covered = torch.zeros_like(allowed, dtype=torch.int64)
    for piece in mask.pieces(q, kv):
        rows = slice(piece.q.start - q.start, piece.q.stop - q.start)
        columns = slice(piece.kv.start - kv.start, piece.kv.stop - kv.start)
        block = torch.ones(piece.q.size, piece.kv.size, dtype=torch.int64)
        covered[rows, columns] += block.tril() if piece.causal else block
        assert not piece.causal or piece.q.size == piece.kv.size
    assert torch.equal(covered, allowed.long())
    assert mask.area(q, kv) == int(allowed.sum())
