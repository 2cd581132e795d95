"""`auto` is what the cost model finds fastest, for a call, for a run and in every table.

Predictions are planted so that each candidate in turn is the fastest.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from longctx_patch import LongContextConfig, run_virtual_ranks, virtual_group
from longctx_patch.choose.compare import compare, explain
from longctx_patch.choose.degrees import Way, best_way
from longctx_patch.choose.search import result_of, search
from longctx_patch.cli.main import main
from longctx_patch.engine.call import CallShape
from longctx_patch.hf.call.sharded import LayerKind, ShardedCall
from longctx_patch.kernels import Score
from longctx_patch.plans import Direction
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.sequence.documents import Documents
from tests.choose.planting import planted
from tests.predict.attention.test_costs import H200
from tests.predict.run.jobs import llama_job

TOKENS, HEADS, HEAD_DIM = 64, 8, 8
WORKLOAD = Workload(num_tokens=TOKENS, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM)
SHAPE = CallShape(1, HEADS, HEADS, HEAD_DIM, torch.float32, "cpu")
RING = LongContextConfig(ring_degree=16, hardware="h200")
ULYSSES = LongContextConfig(ulysses_degree=4, hardware="h200")
PLANS = ["zigzag", "zigzag_direct", "double_ring", "allgather"]
WINNERS = [
    *((Direction.FORWARD, plan) for plan in PLANS),
    *((Direction.BACKWARD, plan) for plan in (*PLANS, "burst")),
]


def on_one_rank(config: LongContextConfig, make: Callable[[Any], Any]) -> Any:
    """What `make` returns on each rank of a group, which has to be the same on all."""
    found = run_virtual_ranks(config.sequence_degree, lambda t: make(virtual_group(t, config)))
    assert all(other == found[0] for other in found)
    return found[0]


def of_a_layer(config: LongContextConfig) -> Setting:
    """The setting that a patched model's layer runs."""
    kind = LayerKind(Score(1.0), None, SHAPE)

    def make(group: Any) -> Setting:
        call = ShardedCall(group, Documents.one(TOKENS), None, (TOKENS,), set())
        return call.attention(kind).setting

    found: Setting = on_one_rank(config, make)
    return found


def of_a_run(config: LongContextConfig) -> Setting:
    """The setting with which `longctx plan` and `longctx patch` predict a training run."""
    job = llama_job("16xH200", 2**17)
    degrees = {"ulysses": config.ulysses_degree, "ring": config.ring_degree}
    return result_of(job, **degrees, checkpoint="attention").candidate.setting  # type: ignore[arg-type]


def printed(*words: object) -> dict[str, Any]:
    """What `longctx schedule` reports for small heads on H200."""
    sizes = ("--seq-len", TOKENS, "--heads", HEADS, "--kv-heads", HEADS, "--hardware", "h200")
    command = ["schedule", *map(str, (*words, *sizes)), "--json"]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(("direction", "plan"), WINNERS)
def test_the_fastest_plan_runs(direction: Direction, plan: str) -> None:
    def seconds(setting: Setting, way: Direction) -> float:
        return 1.0 if (way, setting.plan_of(way)) == (direction, plan) else 2.0

    with planted(seconds):
        assert of_a_layer(RING).plan_of(direction) == plan
        assert of_a_run(RING).plan_of(direction) == plan
        (row,) = (row for row in explain(RING, WORKLOAD, [direction]).rows if row.chosen)
        assert row.prediction.plan == plan
        words = ("--plan", "auto", "--ranks", 16, "--direction", direction.value)
        assert printed(*words)["plan"] == plan


@pytest.mark.parametrize("way", [Way(4, 1), Way(2, 2), Way(1, 4)])
def test_the_fastest_degrees_are_taken(way: Way) -> None:
    def seconds(setting: Setting, _: Direction) -> float:
        degrees = (setting.ulysses_degree, setting.ring_degree)
        return 1.0 if degrees in ((1, 1), way[:2]) else 2.0

    with planted(seconds):
        assert best_way({WORKLOAD: 1}, H200, 4) == way
        rows = compare(WORKLOAD, H200, 4).rows
        assert {r.prediction.ulysses_degree for r in rows if r.chosen} == {way.ulysses}
        found = [result.candidate for result in search(llama_job("4xH200", 2**15))]
        assert {c.ulysses for c in found if c.sequence_degree == 4} == {way.ulysses}
