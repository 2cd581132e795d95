"""How rows and lse are handed to FlashAttention's variable-length form; this needs no GPU."""

import torch

from longctx_patch.kernels import Segments, Window
from longctx_patch.kernels.backends.varlen import lengths_of, window_keywords
from longctx_patch.kernels.base import CAUSAL_WINDOW, FULL_WINDOW


def test_segments_of_a_batch_are_one_after_another() -> None:
    q = torch.zeros(2, 6, 4, 8)
    lengths = lengths_of(Segments((5, 1), (7, 3), CAUSAL_WINDOW), q)
    assert lengths.cumulative_q is not None
    assert lengths.cumulative_q.tolist() == [0, 5, 6, 11, 12]
    assert lengths.cumulative_kv is not None
    assert lengths.cumulative_kv.tolist() == [0, 7, 10, 17, 20]
    assert (lengths.max_q, lengths.max_kv) == (5, 7)
    again = lengths_of(Segments((5, 1), (7, 3), CAUSAL_WINDOW), q)
    assert again.cumulative_q is lengths.cumulative_q


def test_one_segment_is_told_by_its_size() -> None:
    q = torch.zeros(2, 6, 4, 8)
    lengths = lengths_of(Segments((6,), (9,), CAUSAL_WINDOW), q)
    assert tuple(lengths) == (None, None, 6, 9)
    assert lengths.keywords == {}
    assert lengths.packed(q)[0] is q


def test_the_lse_is_packed_in_memory() -> None:
    """Kernels take its strides for granted. An lse kept as [B, L, H], as executors do, made a
    strided view, and gradients were wrong."""
    lengths = lengths_of(Segments((5, 1), (5, 1), CAUSAL_WINDOW), torch.zeros(2, 6, 4, 8))
    lse_BHL = torch.arange(48.0).view(2, 6, 4).transpose(1, 2)
    packed = lengths.packed_lse(lse_BHL)
    assert packed.is_contiguous()
    assert torch.equal(packed, torch.cat([lse_BHL[0], lse_BHL[1]], 1))
    assert torch.equal(lengths.lse_by_batch(packed, 2), lse_BHL)


def test_absent_bounds_are_what_a_kernel_calls_them() -> None:
    full, left = (Segments((5,), (5,), rule) for rule in (FULL_WINDOW, Window(3, None)))
    assert window_keywords(full, absent=None) == {
        "window_size_left": None,
        "window_size_right": None,
    }
    assert window_keywords(left, absent=-1) == {"window_size_left": 3, "window_size_right": -1}
