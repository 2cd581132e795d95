"""Degrees that the cost model takes, against what was fastest on 4 H200."""

from dataclasses import replace

import pytest

from longctx_patch.choose.chooser import choose_for
from longctx_patch.choose.degrees import SAME, Way, preferred, seconds_of_ways, ways
from longctx_patch.config import LongContextConfig
from longctx_patch.engine.call import AttentionCall
from longctx_patch.engine.groups import virtual_group
from longctx_patch.kernels import Score
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.machines import MACHINES
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.masks import documents_mask
from longctx_patch.transport import VirtualTransport, run_virtual_ranks
from tests.predict.attention.test_costs import H200, WORKLOAD, masked

ULYSSES, RING = Way(4, 1), Way(1, 4)


def chosen(workload: Workload, degree: int = 4, gpus_per_node: int = 8) -> Way:
    hardware = replace(H200, gpus_per_node=gpus_per_node)
    return preferred(seconds_of_ways({workload: 1}, hardware, degree))


@pytest.mark.parametrize("num_tokens", [16384, 65536, 131072])
def test_causal_rows_are_for_ulysses(num_tokens: int) -> None:
    assert chosen(replace(WORKLOAD, num_tokens=num_tokens)) == ULYSSES


@pytest.mark.parametrize("num_documents", [64, 300])
def test_rows_of_short_documents_are_for_a_ring(num_documents: int) -> None:
    assert chosen(masked(num_documents)) == RING


def test_rows_of_a_few_long_documents_are_for_ulysses() -> None:
    assert chosen(masked(4)) == ULYSSES
    assert chosen(masked(16)) == ULYSSES


def test_windows_are_for_a_ring_of_contiguous_shards() -> None:
    assert chosen(masked(None)) == Way(1, 4, "contiguous")


def test_the_layers_of_a_model_count_together() -> None:
    """Full attention takes most of the time, and its shards have to be balanced."""
    seconds = seconds_of_ways({masked(None): 12, WORKLOAD: 12}, H200, 4)
    assert preferred(seconds) == ULYSSES
    assert {way.layout for way in seconds} == {None}
    parts = [seconds_of_ways({kind: 12}, H200, 4) for kind in (masked(None), WORKLOAD)]
    for way, found in seconds.items():
        assert found == pytest.approx(sum(part[way] for part in parts))


def test_ulysses_stays_inside_a_node() -> None:
    short = Documents.typical(131072, 2048).lengths
    for workload in (WORKLOAD, replace(WORKLOAD, lengths=short)):
        assert chosen(workload, degree=16).ulysses <= 8
        assert chosen(workload, degree=16, gpus_per_node=2).ulysses <= 2


def test_no_key_value_head_is_sent_twice() -> None:
    found = ways(12, num_kv_heads=8, gpus_per_node=8)
    assert found == [Way(1, 12), Way(2, 6), Way(4, 3)]
    assert ways(12, num_kv_heads=12, gpus_per_node=6) == [
        Way(1, 12),
        Way(2, 6),
        Way(3, 4),
        Way(6, 2),
    ]
    assert ways(1, num_kv_heads=1, gpus_per_node=8) == [Way(1, 1)]


def test_ulysses_and_the_usual_layout_win_a_tie() -> None:
    near, far = 1 + 0.9 * SAME, 1 + 1.1 * SAME
    contiguous = Way(1, 4, "contiguous")
    assert preferred({RING: 1.0, ULYSSES: near, Way(2, 2): near}) == ULYSSES
    assert preferred({RING: 1.0, ULYSSES: far}) == RING
    assert preferred({RING: near, contiguous: 1.0, ULYSSES: far}) == RING
    assert preferred({RING: far, contiguous: 1.0, ULYSSES: far}) == contiguous


def test_the_placement_of_the_config_counts() -> None:
    """With a share of attention kept, tokens are striped, and every rank needs all others'."""
    config = LongContextConfig(checkpoint="attention", attention_kept=0.5)
    for workload in (masked(64), masked(None)):
        plain = seconds_of_ways({workload: 1}, H200, 4)
        striped = seconds_of_ways({workload: 1}, H200, 4, config)
        assert striped[RING] > 1.5 * plain[RING]
        assert preferred(striped) == ULYSSES


@pytest.mark.parametrize("num_tokens", [32768, 131072])
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("mean", [2048, 131072])
def test_waves_are_predicted_as_they_run(num_tokens: int, window: int | None, mean: int) -> None:
    """A mask's pairs decide, alike for all rows that have about as many."""
    documents = Documents.typical(num_tokens, mean)
    config = LongContextConfig(ulysses_degree=8, hardware="h200")
    mask = documents_mask(documents, window=window)

    def waves(ranks: VirtualTransport) -> int:
        group = virtual_group(ranks, config)
        return len(AttentionCall(group, documents, mask, Score(1.0), 32, 8).waves(1, 128, 2))

    workload = replace(WORKLOAD, num_tokens=num_tokens, lengths=documents.lengths, window=window)
    (found,) = set(run_virtual_ranks(8, waves))
    assert choose_for(config, Direction.FORWARD, workload).ulysses_waves == found
    is_sparse = window is not None or mean < num_tokens
    assert found == (1 if is_sparse and num_tokens == 32768 else 2)


def test_typical_documents() -> None:
    row = Documents.typical(131072, 2048)
    assert (len(row.lengths), sum(row.lengths), row.num_tokens) == (64, 131072, 131072)
    assert list(row.lengths) == sorted(row.lengths)
    # exp(N(0, 1)): the mean is exp(0.5) times the median.
    assert row.lengths[32] == pytest.approx(2048 / 1.65, rel=0.1)
    assert Documents.typical(100, 4096) == Documents.one(100)
    assert sum(Documents.typical(10, 1).lengths) == 10
    assert seconds_of_ways({replace(WORKLOAD, lengths=row.lengths): 1}, MACHINES["a100"], 2)
