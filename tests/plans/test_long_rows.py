"""Plans of long rows of many documents: equal work on every rank, and made within milliseconds."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from longctx_patch.plans import Direction
from longctx_patch.plans.pieces import piece_table
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.sequence.placement import place
from tests.plans.random_masks import areas, make_plan


def all_equal(num_tokens: int, seed: int) -> Documents:
    count = (40, 17, 300)[seed]
    return Documents((num_tokens // count,) * count, num_tokens)


def log_normal(num_tokens: int, seed: int) -> Documents:
    random = np.random.default_rng(seed)
    weights = random.lognormal(0.0, 1.5, size=400)
    lengths = np.maximum(1, weights * (num_tokens - 400) / weights.sum()).astype(int)
    return Documents(tuple(lengths.tolist()), num_tokens)


def giant_and_tiny(num_tokens: int, seed: int) -> Documents:
    giant, tiny = int(num_tokens * (0.3, 0.6, 0.9)[seed]), 50
    rest = (num_tokens - giant) // tiny
    before = (0, rest // 3, rest)[seed]
    return Documents((tiny,) * before + (giant,) + (tiny,) * (rest - before), num_tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("make", [all_equal, log_normal, giant_and_tiny])
def test_balanced_ranks_compute_equal_areas(
    make: Callable[[int, int], Documents], num_ranks: int, seed: int
) -> None:
    row = make(131_072, seed)
    layout = place("balanced", row, ring=num_ranks)
    assert max(layout.sizes) == min(layout.sizes)
    for name in ("halo", "allgather"):
        for direction in Direction:
            computed = areas(make_plan(name, layout, documents_mask(row), direction))
            assert sum(computed) == sum(length * (length + 1) // 2 for length in row.lengths)
            assert max(computed) * num_ranks <= 1.05 * sum(computed), (name, direction)


def seconds_to_plan(row: Documents, num_ranks: int) -> float:
    """CPU time from the lengths of the documents to both plans, nothing being cached."""
    place.cache_clear()
    piece_table.cache_clear()
    begin = time.process_time()
    fresh = Documents(row.lengths, row.num_tokens)
    layout = place("balanced", fresh, ring=num_ranks)
    mask = documents_mask(fresh)
    for direction in Direction:
        make_plan("halo", layout, mask, direction, num_kv_heads=8)
    return time.process_time() - begin


@pytest.mark.parametrize("seed", range(3))
def test_a_million_tokens_are_planned_in_50_ms(seed: int) -> None:
    weights = np.random.default_rng(seed).lognormal(0.0, 1.0, size=2000)
    lengths = np.maximum(1, weights * (1_048_576 - 2000) / weights.sum()).astype(int)
    row = Documents(tuple(lengths.tolist()), 1_048_576)
    assert min(seconds_to_plan(row, 8) for _ in range(5)) < 0.05
