"""Making plans for long rows of many documents takes little work."""

import numpy as np

from longctx_patch.plans import Direction, verify_plan
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.sequence.placement import place
from tests.counting import count_calls
from tests.plans.random_masks import make_plan


def log_normal(num_tokens: int, count: int) -> Documents:
    weights = np.random.default_rng(0).lognormal(0.0, 1.5, size=count)
    lengths = np.maximum(1, weights * (num_tokens - count) / weights.sum()).astype(int)
    return Documents(tuple(lengths.tolist()), num_tokens)


def calls_to_plan(num_tokens: int, count: int) -> float:
    """Python calls per document to place a row and to make and verify both of its plans."""
    row = log_normal(num_tokens, count)

    def plan() -> None:
        layout, mask = place.__wrapped__("balanced", row, ring=8), documents_mask(row)
        for direction in Direction:
            verify_plan(make_plan("halo", layout, mask, direction))

    return count_calls(plan) / count


def test_planning_takes_a_constant_number_of_calls_for_each_document() -> None:
    calls = [calls_to_plan(*row) for row in ((131_072, 500), (1_048_576, 500), (1_048_576, 2000))]
    assert max(calls[1:]) < 1.2 * calls[0] < 1000
