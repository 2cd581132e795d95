"""Every kind of mask under every plan equals dense attention, on virtual ranks."""

from typing import Any

import numpy as np
import pytest
import torch

from longctx_patch import LongContextConfig
from longctx_patch.engine.decided import row_mask
from longctx_patch.engine.executor import only_call
from longctx_patch.kernels import available
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.table import PLANS, make_schedule
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.placement import place
from tests.covering import covering
from tests.engine.exact import Case, assert_exact, causal_row, config_of
from tests.masked import Masked, masks_of

MASKS = {case.name: case for case in (causal_row(41), *masks_of(41))}
PLACED = [("auto", None), *((plan, record.layouts[0]) for plan, record in PLANS.items())]
"""Other layouts of a plan: tests/plans/test_masked_plans.py."""
KINDS: list[dict[str, Any]] = [
    {"heads": (4, 2)},
    {"heads": (7, 7), "dtype": torch.float32, "sinks": True},
    {"heads": (6, 2), "sinks": True, "softcap": 1.5},
    {"heads": (4, 1), "dtype": torch.float32, "softcap": 1.5},
]


@pytest.mark.parametrize(
    ("name", "placed", "degrees", "kind"),
    covering(list(MASKS), PLACED, [(1, 3), (1, 4), (2, 2), (3, 2)], KINDS),
    ids=str,
)
def test_every_mask_under_every_plan(
    name: str, placed: tuple[Any, Any], degrees: tuple[int, int], kind: dict[str, Any]
) -> None:
    assert_exact(Case(config_of(*placed, *degrees), MASKS[name], **kind))


@pytest.mark.parametrize("ulysses", [1, 4])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_without_a_ring(name: str, ulysses: int) -> None:
    assert_exact(Case(LongContextConfig(ulysses_degree=ulysses), MASKS[name], sinks=True))


@pytest.mark.parametrize("kernel", ["torch_cpu", "torch_eager"])
def test_ranks_with_whole_documents_send_nothing(kernel: str) -> None:
    """One of the two kernels takes all documents of a rank in one call, the other can't."""
    row, tokens = Documents((6, 10) * 4, 64), np.arange(64)
    document = np.repeat(np.arange(8), row.lengths)
    table = (tokens[:, None] >= tokens) & (document[:, None] == document)
    config = LongContextConfig(ring_degree=4, kernel=kernel)
    ranks = assert_exact(Case(config, Masked("whole", row, None, None, table)))
    assert all(found.sent.bytes == 0 for found in ranks)
    layout = place("balanced", row, ring=4)
    traits = available()[kernel].traits
    for direction in Direction:
        plan = make_schedule(
            "halo", direction, layout, row_mask(None, row, None), num_kv_heads=2
        ).plan()
        calls = [only_call(plan, rank, traits) for rank in range(4)]
        assert [call is not None for call in calls] == [traits.segments] * 4


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_padding_alone_see_nothing(sinks: bool) -> None:
    """Padding sees nothing, also on the last rank, which holds only padding."""
    table = np.zeros((12, 12), dtype=np.bool_)
    table[:2, :2] = [[True, False], [True, True]]
    table[2, 2] = True
    config = LongContextConfig(ring_degree=4, layout="contiguous")
    padded = Masked("padding", Documents((2, 1), 12), None, None, table)
    assert_exact(Case(config, padded, (2, 2), sinks=sinks))
