"""Ulysses: every head is computed once."""

import pytest

from longctx_patch.plans.head_split import HeadSplit


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (32, 32), (7, 7), (12, 4)])
@pytest.mark.parametrize("degree", [1, 2, 4, 5])
def test_every_head_is_computed_once(heads: int, kv_heads: int, degree: int) -> None:
    split = HeadSplit(heads, kv_heads, degree)
    assert sorted(head for cut in split.query for head in range(*cut)) == list(range(heads))
    for q, kv in zip(split.query, split.key_value, strict=True):
        assert {head * kv_heads // heads for head in range(*q)} == set(range(*kv))
