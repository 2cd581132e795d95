"""Packed rows, windows and other masks in patched models on 1, 3 and 4 ranks equal stock eager. A
fault would show, because the rows are awkward and the masks and windows matter."""

from collections import Counter
from itertools import product

import pytest
import torch

from longctx_patch.sequence.placement import place
from tests.harness import run_distributed
from tests.hf.features import WINDOW
from tests.hf.masked_cases import CASES
from tests.hf.masked_models import MASKS, MODELS, assert_equal, documents_alone, run_cases
from tests.hf.steps import TOLERANCE
from tests.reference import relative_error


def test_one_rank_equals_the_documents_alone() -> None:
    assert_equal(run_cases(0, CASES[1]), CASES[1])


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_equal_the_documents_alone(num_ranks: int) -> None:
    cases = CASES[num_ranks]
    assert_equal(run_distributed(run_cases, num_ranks, cases)[0], cases)


def test_the_cases_have_what_is_awkward() -> None:
    """The cases have boundaries on, one before and one after a rank's edge in every placement,
    ranks with only padding, documents longer than a share, and every policy."""
    seen: Counter[tuple[str, int]] = Counter()
    for case in [case for cases in CASES.values() for case in cases if case.ring > 1]:
        config, row = case.config, case.documents
        name = config.placement_of(row)
        layout = place(name, row, ring=case.ring, ulysses=case.ulysses)
        edges = {i.start for rank in layout.intervals for i in rank} - {0}
        for boundary, edge in product(row.edges[1:], edges):
            seen[name, boundary - edge] += not row.is_one
        for rank in range(layout.num_ranks):
            seen["a rank of padding", 0] += int(layout.positions(rank).min()) >= row.edges[-1]
        seen["a long one", 0] += not row.is_one and max(row.lengths) > max(layout.sizes)
        seen[case.checkpoint, 0] += 1
    for layout_name, offset in product(("balanced", "zigzag", "contiguous"), (-1, 0, 1)):
        assert seen[layout_name, offset] >= 3, (layout_name, offset)
    for what in ("a rank of padding", "a long one", "full", "attention"):
        assert seen[what, 0] >= 3, what
    assert {case.model for case in CASES[4]} == set(MODELS)


@pytest.mark.parametrize("mask", MASKS)
def test_the_masks_matter(mask: str) -> None:
    """Each mask changes the loss, so comparisons under it mean something."""
    plain, masked = (documents_alone("llama", (48,), WINDOW, name, 48) for name in (None, mask))
    assert relative_error(masked.loss, plain.loss) > 100 * TOLERANCE


def test_the_windows_matter() -> None:
    lengths = (4, 15, 27, 2)
    narrow, document, wide = (
        documents_alone("qwen2", lengths, window, None, 0) for window in (25, 27, 1000)
    )
    errors = [relative_error(narrow.grads[name], grad) for name, grad in wide.grads.items()]
    assert max(errors) > 100 * TOLERANCE
    assert torch.equal(document.loss, wide.loss)
