"""The way of a recurrent layer: what the config names, what heads allow, and the cost model."""

from dataclasses import replace
from typing import get_args

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.planner.attention_cost import Workload
from longctx_patch.planner.compare import compare
from longctx_patch.planner.degrees import Way, best_way, costs_of_ways
from longctx_patch.planner.machines import MACHINES
from longctx_patch.planner.recurrent_cost import (
    HOST_CALL_S,
    RecurrencePrediction,
    RecurrentWork,
    predict_decided,
    predict_recurrence,
    recompute_of,
    row_of,
)
from longctx_patch.plans.recurrent import (
    RecurrenceKind,
    RecurrentExchange,
    RecurrentShape,
    RecurrentWay,
    decide_recurrence,
)
from longctx_patch.plans.traffic import Traffic
from longctx_patch.sequence.documents import Documents

QWEN = RecurrentShape(kind="delta rule", num_heads=32, num_groups=16, key_dim=128, value_dim=128)
ROW = Documents.one(131072)
H100 = MACHINES["h100"]
ULYSSES = LongContextConfig(ulysses_degree=4)


def both_ways(
    config: LongContextConfig, shape: RecurrentShape, documents: Documents
) -> tuple[RecurrencePrediction, RecurrencePrediction]:
    """(states, heads): what each takes."""
    row = row_of(config, documents)
    return (
        predict_recurrence(shape, row, "states", H100),
        predict_recurrence(shape, row, "heads", H100),
    )


def decided(
    shape: RecurrentShape = QWEN,
    documents: Documents = ROW,
    *,
    ulysses: int = 4,
    ring: int = 1,
    named: RecurrentExchange = "auto",
) -> RecurrentWay:
    return decide_recurrence(named, shape, documents, ulysses=ulysses, ring=ring)


def test_what_is_named_is_taken() -> None:
    assert (decided(named="states"), decided(named="heads")) == ("states", "heads")


def test_heads_that_do_not_divide_take_states() -> None:
    odd = replace(QWEN, num_heads=30, num_groups=15)
    assert decided(odd) == decided(ulysses=1, ring=4) == "states"
    with pytest.raises(ValueError, match="30 heads with a state are no multiple of ulysses_deg"):
        decided(odd, named="heads")
    with pytest.raises(ValueError, match="5 key heads or groups and ulysses_degree=4: neither"):
        decided(replace(QWEN, num_heads=40, num_groups=5), named="heads")


@pytest.mark.parametrize("kind", ["delta rule", "delta rule by channel", "Mamba-2"])
@pytest.mark.parametrize("documents", [1, 2, 64])
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (4, 1), (2, 4)])
def test_the_rule_takes_what_is_predicted_faster(
    kind: RecurrenceKind, documents: int, ulysses: int, ring: int
) -> None:
    """Or what is at most a fifth slower, on rows of the length of a step on GPUs."""
    config = LongContextConfig(ulysses_degree=ulysses, ring_degree=ring)
    shape, row = replace(QWEN, kind=kind), Documents((131072 // documents,) * documents, 131072)
    states, heads = (way.seconds() for way in both_ways(config, shape, row))
    taken = {"states": states, "heads": heads}[decided(shape, row, ulysses=ulysses, ring=ring)]
    assert taken < 1.2 * min(states, heads)


@pytest.mark.parametrize("lengths", [(60000, 2768, 2768), (57344, *(1024,) * 8)])
@pytest.mark.parametrize("ulysses", [2, 4])
def test_a_document_with_branches_counts_once(lengths: tuple[int, ...], ulysses: int) -> None:
    tree = Documents(lengths, sum(lengths), (-1, *(0,) * (len(lengths) - 1)))
    config = LongContextConfig(ulysses_degree=ulysses)
    states, heads = (way.seconds() for way in both_ways(config, QWEN, tree))
    assert heads < states
    assert decided(documents=tree, ulysses=ulysses) == "heads"


def test_short_rows_take_states() -> None:
    assert decided(documents=Documents.one(2**15)) == "heads"
    assert decided(documents=Documents.one(2**15 - 4)) == "states"


def test_documents_that_stay_on_their_ranks_take_states() -> None:
    """Nothing travels for them, and no map is found."""
    documents = Documents((32768,) * 4, 131072)
    states, heads = both_ways(ULYSSES, QWEN, documents)
    assert all(traffic.forward == Traffic() for traffic in states.traffic)
    run_s = 32768 * QWEN.run_flops / H100.recurrent.delta_rule
    assert states.forward_s == pytest.approx(run_s)
    assert heads.forward_s > run_s
    assert decided(documents=documents) == "states"


def test_the_cpu_bounds_many_short_documents_that_a_kernel_takes_one_by_one() -> None:
    """It launches a call for each: of those of a rank, or with heads exchanged of all. Kernels of
    delta rules take all in one call, but for a batch."""
    documents = Documents((128,) * 1024, 131072)
    of_two = replace(QWEN, batch=2, num_heads=16, num_groups=8)
    states, heads = both_ways(ULYSSES, of_two, documents)
    assert states.forward_s == states.backward_s == pytest.approx(256 * HOST_CALL_S)
    assert heads.forward_s == pytest.approx(1024 * HOST_CALL_S + 1.5 * H100.host_ulysses_s)
    states, _ = both_ways(ULYSSES, QWEN, documents)
    run_s = 32768 * QWEN.run_flops / H100.recurrent.delta_rule
    assert states.forward_s == pytest.approx(run_s)
    mamba, _ = both_ways(ULYSSES, replace(QWEN, kind="Mamba-2"), documents)
    assert mamba.forward_s == pytest.approx(256 * HOST_CALL_S)


def test_ranks_wait_for_the_slowest_map_and_then_run() -> None:
    row = row_of(LongContextConfig(ring_degree=4, layout="contiguous"), ROW)
    found = predict_recurrence(QWEN, row, "states", H100)
    rate, size = H100.recurrent.delta_rule, 131072 // 4
    state, map_bytes = 4 * 32 * 128 * 128, 4 * 32 * 128 * 128
    assert [t.forward.bytes for t in found.traffic] == [
        3 * state,
        2 * (state + map_bytes),
        state + map_bytes,
        0,
    ]
    link = H100.intra_node
    travel_s = link.latency_s + (state + 2 * (state + map_bytes)) / link.bandwidth
    compute_s = size * (QWEN.map_flops + QWEN.run_flops) / rate
    assert found.forward_s == pytest.approx(compute_s + travel_s)


def test_heads_send_each_tensor_once() -> None:
    """Queries, keys, values and outputs in bfloat16, and two numbers per head in float32."""
    _, heads = both_ways(ULYSSES, QWEN, ROW)
    away = 131072 // 4 * 3 // 4
    per_token = 2 * 2 * 16 * 128 + 2 * 2 * 32 * 128 + 2 * 4 * 32
    assert {t.forward for t in heads.traffic} == {Traffic(3 * 3, away * per_token)}
    assert {t.backward for t in heads.traffic} == {Traffic(3 * 3, away * per_token)}


def test_layers_are_recomputed_as_their_policy_says() -> None:
    found = {
        name: recompute_of(replace(ULYSSES, checkpoint=name)) for name in get_args(CheckpointPolicy)
    }
    assert found == {
        "none": "none",
        "full": "whole",
        "attention": "replay",
        "offload": "replay",
        "auto": "replay",
    }
    kept = replace(ULYSSES, checkpoint="attention", attention_kept=0.1, layout="zigzag")
    assert recompute_of(kept) == "replay"
    assert recompute_of(replace(kept, attention_kept=0.0)) == "whole"


@pytest.mark.parametrize(
    ("way", "config", "forward_ms", "both_ms"),
    [
        ("states", LongContextConfig(ring_degree=2, layout="contiguous"), 10.84, 38.87),
        ("heads", LongContextConfig(ulysses_degree=2, layout="contiguous"), 14.13, 36.97),
    ],
)
def test_two_ranks_take_what_was_measured(
    way: RecurrentWay, config: LongContextConfig, forward_ms: float, both_ms: float
) -> None:
    """docs/results/performance.md: one layer of Qwen3.5-9B, whose key heads were repeated, over
    131,072 tokens on two H100, in forward, and with its backward."""
    shape = replace(QWEN, num_groups=32)
    found = predict_recurrence(shape, row_of(config, ROW), way, H100)
    assert found.forward_s == pytest.approx(forward_ms / 1e3, rel=0.05)
    assert found.seconds() == pytest.approx(both_ms / 1e3, rel=0.05)


def test_a_replay_waits_for_no_other_rank() -> None:
    """The second of two contiguous shards waits in forward until the first has run."""
    row = row_of(LongContextConfig(ring_degree=2, layout="contiguous"), ROW)
    found = predict_recurrence(QWEN, row, "states", H100)
    run_s = ROW.num_tokens / 2 * QWEN.run_flops / H100.recurrent.delta_rule
    assert 2 * run_s < found.forward_s < 2.1 * run_s
    assert found.replay_s == pytest.approx(run_s)
    assert {t.replay for t in found.traffic} == {Traffic()}
    seconds = [found.seconds(again) for again in ("none", "replay", "whole")]
    step_s = found.forward_s + found.backward_s
    assert seconds == pytest.approx([step_s, step_s + run_s, step_s + found.forward_s])


def test_a_replay_exchanges_what_is_too_large_to_keep() -> None:
    """A batch of 64 rows has states of 128 MiB; heads are as long as the row."""
    row = row_of(LongContextConfig(ring_degree=2, layout="contiguous"), ROW)
    large = predict_recurrence(replace(QWEN, batch=64), row, "states", H100)
    assert large.replay_s == large.forward_s
    assert [t.replay for t in large.traffic] == [Traffic(1, 2**27), Traffic()]
    both = replace(ULYSSES, ulysses_degree=2, ring_degree=2, layout="contiguous")
    _, heads = both_ways(both, QWEN, ROW)
    mine = replace(QWEN, num_heads=16, num_groups=8)
    alone = predict_recurrence(mine, row, "states", H100)
    exchange_s = heads.forward_s - alone.forward_s
    assert exchange_s > 0
    assert heads.replay_s == pytest.approx(alone.replay_s + exchange_s)
    state = Traffic(1, 4 * 16 * 128 * 128)
    assert [t.forward for t in heads.traffic] == [
        heads.traffic[rank].replay + (state if rank < 2 else Traffic()) for rank in range(4)
    ]


def test_degrees_are_chosen_with_recurrent_layers_counted() -> None:
    """Costs of the layers add up."""
    attention = Workload(num_tokens=131072, num_heads=16, num_kv_heads=4, head_dim=256)
    work = RecurrentWork(QWEN, ROW)
    both = costs_of_ways({attention: 2}, H100, 4, recurrent={work: 6})
    alone = costs_of_ways({attention: 2}, H100, 4)
    assert both.keys() == alone.keys()
    for way, cost in both.items():
        found = predict_decided(way.applied_to(LongContextConfig()), work, H100)
        assert cost.seconds == pytest.approx(alone[way].seconds + 6 * found.seconds())
        assert cost.sent_bytes == alone[way].sent_bytes + 6 * found.sent_bytes


def test_recurrent_layers_can_decide_the_degrees() -> None:
    """Layers with a window alone would take a ring. Where the kernel of a recurrence is slow, it
    pays to run it once, with heads exchanged."""
    window = Workload(num_tokens=131072, num_heads=16, num_kv_heads=4, head_dim=256, window=4096)
    slow = replace(H100, recurrent=replace(H100.recurrent, delta_rule=1e13))
    assert best_way({window: 1}, slow, 4) == Way(1, 4, "contiguous")
    assert best_way({window: 1}, slow, 4, recurrent={RecurrentWork(QWEN, ROW): 3}) == Way(4, 1)
    rows = compare(window, slow, 4, recurrent={RecurrentWork(QWEN, ROW): 3}).rows
    assert any(row.slower < 0 for row in rows)  # for the layers with attention alone
