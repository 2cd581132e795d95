"""Keeping attention's results for some tokens: gradients are exact, only the rest is computed."""

from typing import Any

import numpy as np
import pytest
import torch

from longctx_patch import LongContextConfig, run_virtual_ranks, virtual_group
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.decided import decided_call
from longctx_patch.engine.selective import first_kept, rows_before, selection_of
from longctx_patch.kernels import Score
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.transport import VirtualTransport
from tests.covering import covering
from tests.engine.exact import Case, assert_exact, causal_row
from tests.masked import masks_of

HEADS, KV_HEADS = 6, 2
PLACED = [
    *((1, 1, "zigzag"), (2, 1, "zigzag"), (1, 2, "zigzag"), (1, 3, "striped"), (2, 2, None)),
    *((1, 3, "contiguous"), (1, 2, "balanced")),
]


SELECTED = ("window", "prefix", "documents", "branches")
CASES = {
    "causal": causal_row(48),
    "sinks": causal_row(48),
    **{case.name: case for case in masks_of(48) if case.name in SELECTED},
}


@pytest.mark.parametrize(
    ("name", "placed", "share"), covering(list(CASES), PLACED, [0.0, 0.3, 0.75]), ids=str
)
def test_equals_dense(name: str, placed: tuple[int, int, Any], share: float) -> None:
    ulysses, ring, layout = placed
    config = LongContextConfig(
        ulysses_degree=ulysses,
        ring_degree=ring,
        layout=layout,
        checkpoint="attention",
        attention_kept=share,
    )
    masked = CASES[name]
    case = Case(config, masked, (HEADS, KV_HEADS), sinks=name == "sinks", share=share)
    kept = sum(found.kept_rows for found in assert_exact(case))
    most = share * sum(masked.documents.lengths)
    assert most - len(masked.documents.lengths) < kept / HEADS <= most


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("lengths", [(4096,), (4000, 64, 32)])
def test_ranks_keep_equally_much(ulysses: int, ring: int, lengths: tuple[int, ...]) -> None:
    config = LongContextConfig(
        ulysses_degree=ulysses, ring_degree=ring, checkpoint="attention", attention_kept=0.25
    )
    assert config.placement == config.packed_placement == "striped"
    documents = Documents(lengths, 4096)
    heads = 8

    def kept_rows(transport: VirtualTransport) -> int:
        group = virtual_group(transport, config)
        mask, score = documents_mask(documents), Score(1.0)
        shape = CallShape(1, heads, heads, 8, torch.float32, "cpu")
        call = decided_call(group, documents, mask, score, shape)
        selection = selection_of(call, 0.25)
        assert selection is not None
        return len(selection._rows)

    wanted = 0.25 * sum(lengths) / ring
    assert all(abs(found - wanted) <= 1 for found in run_virtual_ranks(4, kept_rows))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_the_recompute_is_the_square_of_what_is_not_kept(share: float) -> None:
    documents = Documents.one(2**20)
    mask = documents_mask(documents)
    again = mask & rows_before(documents, first_kept(documents, share))
    assert again.area / mask.area == pytest.approx((1 - share) ** 2, rel=1e-4)


def test_the_longest_documents_are_kept_first() -> None:
    documents = Documents((100, 10, 30), 150)
    assert first_kept(documents, 0.5) == 30
    assert first_kept(documents, 1.0) == 0
    assert first_kept(documents, 0.0) == 100
    branches = Documents((100, 10, 30), 150, (-1, 0, 1))
    assert first_kept(branches, 0.25) == 105
    assert np.flatnonzero(rows_before(branches, 105).dense().any(1)).tolist() == [*range(105)]
    table = rows_before(documents, 30).dense()
    assert np.flatnonzero(table.any(1)).tolist() == [*range(30), *range(100, 140)]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True, None])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_kept=.*from 0 to 1"):
        LongContextConfig(checkpoint="attention", attention_kept=share)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_policies_that_keep_no_part_refuse_a_share(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_kept=0\.5 with checkpoint=.*'attention'"):
        LongContextConfig(checkpoint=policy, attention_kept=0.5)


@pytest.mark.parametrize(
    ("plans", "placement"),
    [
        ({}, "striped"),
        ({"plan": "burst"}, "striped"),
        ({"plan": "zigzag"}, "zigzag"),
        ({"backward_plan": "zigzag_direct"}, "zigzag"),
        ({"plan": "ring", "backward_plan": "ring"}, "contiguous"),
        ({"layout": "contiguous"}, "contiguous"),
    ],
)
def test_the_layout_spreads_documents_where_plans_are_made_for_it(
    plans: dict[str, Any], placement: str
) -> None:
    config = LongContextConfig(ring_degree=4, checkpoint="attention", attention_kept=0.5, **plans)
    assert config.placement == placement
