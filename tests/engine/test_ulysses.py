"""Ulysses in waves: every head is computed once."""

import pytest

from longctx_patch.plans.head_split import HeadSplit


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (32, 32), (7, 7), (12, 4)])
@pytest.mark.parametrize("degree", [1, 2, 4, 5])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_every_head_is_computed_once(heads: int, kv_heads: int, degree: int, most: int) -> None:
    waves = HeadSplit(heads, kv_heads, degree).in_waves(most)
    assert len(waves) == (1 if degree == 1 else min(most, heads // degree))
    cuts = [cut for wave in waves for cut in wave.query]
    assert sorted(head for cut in cuts for head in range(*cut)) == list(range(heads))
    for wave in waves:
        for q, kv in zip(wave.query, wave.key_value, strict=True):
            used = {head * kv_heads // heads for head in range(*q)}
            assert used == set(range(*kv))


def test_waves_are_of_whole_key_value_heads_where_there_are_enough() -> None:
    waves = HeadSplit(32, 8, 4).in_waves(2)
    assert [cut.size for wave in waves for cut in wave.key_value] == [1] * 8
    alone = HeadSplit(28, 4, 4).in_waves(2)  # each rank's one key-value head is in both waves
    assert [cut.size for wave in alone for cut in wave.query] == [3] * 4 + [4] * 4
