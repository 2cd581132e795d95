"""Plans of long rows of many documents: equal work on every rank, made with little work."""

from collections.abc import Callable

import numpy as np
import pytest

from longctx_patch.plans import Direction, verify_plan
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.sequence.placement import place
from tests.counting import count_calls
from tests.plans.random_masks import areas, make_plan


def all_equal(num_tokens: int, seed: int) -> Documents:
    count = (40, 17, 300)[seed]
    return Documents((num_tokens // count,) * count, num_tokens)


def log_normal(num_tokens: int, seed: int, *, count: int = 400) -> Documents:
    weights = np.random.default_rng(seed).lognormal(0.0, 1.5, size=count)
    lengths = np.maximum(1, weights * (num_tokens - count) / weights.sum()).astype(int)
    return Documents(tuple(lengths.tolist()), num_tokens)


def giant_and_tiny(num_tokens: int, seed: int) -> Documents:
    giant, tiny = int(num_tokens * (0.3, 0.6, 0.9)[seed]), 50
    rest = (num_tokens - giant) // tiny
    before = (0, rest // 3, rest)[seed]
    return Documents((tiny,) * before + (giant,) + (tiny,) * (rest - before), num_tokens)


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (4, 1), (8, 2)])
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


def calls_to_plan(num_tokens: int, count: int) -> float:
    """Python calls per document from the lengths of the documents to both verified plans."""
    row = log_normal(num_tokens, 0, count=count)

    def plan() -> None:
        layout, mask = place.__wrapped__("balanced", row, ring=8), documents_mask(row)
        for direction in Direction:
            verify_plan(make_plan("halo", layout, mask, direction))

    return count_calls(plan) / count


def test_planning_takes_a_constant_number_of_calls_for_each_document() -> None:
    calls = [calls_to_plan(*row) for row in ((131_072, 500), (1_048_576, 500), (1_048_576, 2000))]
    assert max(calls[1:]) < 1.2 * calls[0] < 1000
