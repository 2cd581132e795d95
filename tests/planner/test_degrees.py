"""The degrees that the cost model takes are those that were fastest on 4 H200."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from longctx_patch.config import LongContextConfig
from longctx_patch.planner import compare, degrees, step_time
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.degrees import (
    TIE,
    Cost,
    Way,
    best_way,
    costs_of_ways,
    most_ulysses,
    preferred,
)
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.search import search
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.sequence.documents import Documents
from tests.planner.jobs import llama_job
from tests.planner.test_attention_cost import H200, WORKLOAD, masked

ULYSSES, RING = Way(4, 1), Way(1, 4)


def chosen(workload: Workload, degree: int = 4, gpus_per_node: int = 8) -> Way:
    hardware = replace(H200, gpus_per_node=gpus_per_node)
    return best_way({workload: 1}, hardware, degree)


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        *((replace(WORKLOAD, num_tokens=num_tokens), ULYSSES) for num_tokens in (16384, 131072)),
        (masked(4), ULYSSES),
        (masked(16), Way(2, 2)),
        *((masked(num_documents), RING) for num_documents in (64, 300)),
        (masked(None), Way(1, 4, "contiguous")),
    ],
)
def test_the_way_follows_what_the_mask_leaves(workload: Workload, way: Way) -> None:
    assert chosen(workload) == way


def test_the_layers_of_a_model_count_together() -> None:
    """Costs of the layers add up; full attention takes most of them and needs balanced shards."""
    costs = costs_of_ways({masked(None): 12, WORKLOAD: 12}, H200, 4)
    assert preferred(costs) == ULYSSES
    assert {way.layout for way in costs} == {None}
    parts = [costs_of_ways({kind: 12}, H200, 4) for kind in (masked(None), WORKLOAD)]
    for way, found in costs.items():
        assert found.seconds == pytest.approx(sum(part[way].seconds for part in parts))


def test_ulysses_stays_inside_a_node() -> None:
    short = Documents.typical(131072, 2048).lengths
    for workload in (WORKLOAD, replace(WORKLOAD, lengths=short)):
        assert chosen(workload, degree=16).ulysses <= 8
        assert chosen(workload, degree=16, gpus_per_node=2).ulysses <= 2


def test_of_what_is_as_fast_the_largest_ulysses_degree_wins_then_fewest_bytes() -> None:
    near, far = 1 + 0.9 * TIE, 1 + 1.1 * TIE
    assert preferred({RING: Cost(1, 1.0), ULYSSES: Cost(4, near), Way(2, 2): Cost(2, near)}) == (
        ULYSSES
    )
    assert preferred({RING: Cost(1, 1.0), ULYSSES: Cost(4, far, 0, 0)}) == RING
    plans = {"few": Cost(1, near, 1, 2), "many": Cost(1, 1.0, 2, 1), "slow": Cost(1, far, 0, 0)}
    assert preferred(plans) == "few"
    plans |= {"small": Cost(1, near, 1, 1), "as small": Cost(1, 1.0, 1, 1)}
    assert preferred(plans) == "small"


@pytest.mark.parametrize(
    ("ranks", "gpus_per_node", "kv_heads", "ulysses"),
    [
        (1, 1, 8, 1),
        (4, 4, 8, 4),
        (8, 8, 2, 2),  # more would send key-value heads twice
        (16, 8, 8, 8),
        (16, 4, 8, 4),  # Ulysses stays inside a node
        (6, 6, 8, 2),
        (3, 3, 8, 1),
        (5, 5, 10, 5),
        (12, 6, 12, 6),
        (12, 8, 8, 4),
    ],
)
def test_without_a_prediction_as_much_ulysses_as_fits_wins(
    ranks: int, gpus_per_node: int, kv_heads: int, ulysses: int
) -> None:
    found = most_ulysses(ranks, num_kv_heads=kv_heads, gpus_per_node=gpus_per_node)
    assert found == Way(ulysses, ranks // ulysses)


def test_the_placement_of_the_config_counts() -> None:
    """Where a share of attention is kept, tokens are striped: each rank needs all others' keys."""
    config = LongContextConfig(checkpoint="attention", attention_kept=0.5)
    for workload in (masked(64), masked(None)):
        plain = costs_of_ways({workload: 1}, H200, 4)
        striped = costs_of_ways({workload: 1}, H200, 4, config)
        assert striped[RING].seconds > 1.5 * plain[RING].seconds
        assert preferred(striped) == ULYSSES


def test_typical_documents() -> None:
    row = Documents.typical(131072, 2048)
    assert (len(row.lengths), sum(row.lengths), row.num_tokens) == (64, 131072, 131072)
    assert list(row.lengths) == sorted(row.lengths)
    # exp(N(0, 1)): the mean is exp(0.5) times the median.
    assert row.lengths[32] == pytest.approx(2048 / 1.65, rel=0.1)
    assert Documents.typical(100, 4096) == Documents.one(100)
    assert sum(Documents.typical(10, 1).lengths) == 10
    assert costs_of_ways({replace(WORKLOAD, lengths=row.lengths): 1}, MACHINES["a100"], 2)


def test_a_model_without_attention_needs_its_degrees() -> None:
    with pytest.raises(ValueError, match=r"no layer has attention.*Give the degrees"):
        best_way({}, H200, 2)


@pytest.mark.parametrize("way", [Way(4, 1), Way(2, 2), Way(1, 4)])
def test_the_fastest_degrees_are_taken_in_every_table(way: Way) -> None:
    """Predictions are made up so that each way in turn is the fastest."""

    def believed(setting: Setting, direction: Direction, *others: Any) -> Prediction:
        degrees = (setting.ulysses_degree, setting.ring_degree)
        seconds = 1.0 if degrees in ((1, 1), way[:2]) else 2.0
        return replace(predict(setting, direction, *others), makespan_s=seconds)

    workload = Workload(num_tokens=64, num_heads=8, num_kv_heads=8, head_dim=8)
    with ExitStack() as stack:
        for module in (compare, degrees, step_time):
            stack.enter_context(patch.object(module, "predict", believed))
        assert best_way({workload: 1}, H200, 4) == way
        rows = compare.compare(workload, H200, 4).rows
        assert {r.prediction.ulysses_degree for r in rows if r.chosen} == {way.ulysses}
        found = [result.candidate for result in search(llama_job("4xH200", 2**15))]
        assert {c.ulysses for c in found if c.sequence_degree == 4} == {way.ulysses}
