"""Ulysses in waves: heads are computed once each, and what is computed doesn't depend on waves."""

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.plans.head_split import HeadSplit
from tests.covering import covering
from tests.engine.exact import Case, assert_exact, causal_row


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
    alone = HeadSplit(28, 4, 4).in_waves(2)  # one key-value head a rank: it goes with both waves
    assert [cut.size for wave in alone for cut in wave.query] == [3] * 4 + [4] * 4


@pytest.mark.parametrize(
    ("waves", "degrees", "share", "batch", "heads"),
    covering(
        [1, 2, 3],
        [(2, 1), (3, 1), (2, 2)],
        [None, 1.0],
        [1, 2],
        [(12, 6), (7, 1), (6, 6)],
    ),
    ids=str,
)
def test_waves_equal_dense(
    waves: int,
    degrees: tuple[int, int],
    share: float | None,
    batch: int,
    heads: tuple[int, int],
) -> None:
    """They do too where results were kept, and the recompute exchanges heads once more."""
    config = LongContextConfig(
        ulysses_degree=degrees[0], ring_degree=degrees[1], ulysses_waves=waves
    )
    assert_exact(Case(config, causal_row(13), heads, batch=batch, share=share))
