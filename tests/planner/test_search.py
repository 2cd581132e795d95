"""Which candidates the search tries and ranks first, which fit, and how long rows can be."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest

from longctx_patch.cli.plan_report import as_json, render
from longctx_patch.memory.ladder import after_climbs
from longctx_patch.planner import attention_cost as costs
from longctx_patch.planner.degrees import TIE
from longctx_patch.planner.job import Cluster, Job, parse_cluster
from longctx_patch.planner.machines import GIB, MACHINES
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.named_models import NAMED
from longctx_patch.planner.search import Result, fastest_shared, longest, search, usable_bytes
from longctx_patch.planner.step_memory import LAYER_OBJECTS_BYTES, predict_memory
from longctx_patch.planner.step_time import predict_attention
from tests.planner.jobs import llama_job, result_of

NOTHING = Cluster(hardware=replace(MACHINES["h200"], memory_bytes=3 * GIB), num_gpus=1)


def test_the_fastest_that_fit_come_first_then_the_nearest_to_fitting() -> None:
    results = search(llama_job("4xH200", 2**20))
    fits = [result.fits for result in results]
    assert set(fits) == {True, False}
    assert fits == sorted(fits, reverse=True)
    speeds = [result.tokens_per_second_per_gpu for result in results if result.fits]
    assert all(speed >= later * 0.97 for speed, later in pairwise(speeds))
    assert max(speeds) <= speeds[0] * 1.03
    # Among equally fast candidates, those whose states stay on the GPUs come first, and
    # among these the one that takes the least host memory.
    alike = [speed * (1 + TIE) >= max(speeds) for speed in speeds]
    first = results[: alike.count(True)]
    assert len(first) > 2
    assert all(alike[: len(first)])
    order = [(r.candidate.offload_states, r.host_bytes) for r in first]
    assert order == sorted(order)
    assert {states_leave for states_leave, _ in order} == {False, True}
    peaks = [result.memory.total for result in results if not result.fits]
    assert peaks == sorted(peaks)


def with_climbs(result: Result, climbs: int) -> float:
    """Predicted peak of a candidate under `auto` after this number of climbs."""
    job, candidate = result.job, result.candidate
    policies = after_climbs(climbs, job.shape.num_layers)
    degree = candidate.sequence_degree
    buffers = predict_attention(job, candidate.setting).buffer_bytes
    climbed = replace(candidate, policies=policies)
    return predict_memory(job, climbed, job.seq_len / degree, buffers).total


@pytest.mark.parametrize(
    ("gpus", "tokens"), [("8xH200", 2**17), ("4xH200", 2**20), ("H200", 2**12)]
)
def test_auto_climbs_as_long_as_it_fits(gpus: str, tokens: int) -> None:
    job = llama_job(gpus, tokens)
    partly = 0
    for result in (r for r in search(job) if r.candidate.checkpoint == "auto" and r.fits):
        rungs = {"offload": 0, "attention": 1, "none": 2}
        climbs = sum(rungs[policy] for policy in result.candidate.policies)
        assert result.candidate.policies == after_climbs(climbs, 32)
        assert with_climbs(result, climbs) == pytest.approx(result.memory.total)
        if climbs < 64:
            partly += 1
            assert with_climbs(result, climbs + 1) > usable_bytes(job)
    assert partly or tokens == 2**12


def test_what_is_too_large_says_of_what() -> None:
    result = result_of(llama_job("H200", 2**20), ulysses=1, ring=1, checkpoint="none")
    assert not result.fits
    assert result.reason is not None
    assert "needs 4" in result.reason
    assert f"of the {usable_bytes(result.job) / GIB:.0f} that tensors may take" in result.reason
    assert "most of it checkpoints (" in result.reason


def test_a_small_host_refuses_what_is_offloaded() -> None:
    def offloaded(host_gib: float) -> Result:
        job = llama_job("4xH200", 2**19, host_gib=host_gib)
        return result_of(job, ulysses=4, ring=1, checkpoint="offload")

    needed = offloaded(10_000).host_bytes / GIB
    assert offloaded(needed / 0.95 + 1).fits
    refused = offloaded(needed / 0.95 - 1)
    assert not refused.fits
    assert f"needs {needed:.0f} GiB of the {needed - 0.95:.0f} that may be taken on a host" == (
        refused.reason
    )


def test_a_host_too_small_for_loading_refuses_whole_models_only() -> None:
    """Where processes read their own rows, loading takes readers' buffers of each, and layers'
    objects."""
    loads = 4 * 2 * 8_030_261_248 / GIB  # four processes, in bfloat16

    def found(host_gib: float, fsdp: bool) -> Result:
        job = llama_job("4xH200", 2**14, host_gib=host_gib, lora=True, fsdp=fsdp)
        return result_of(job, ulysses=4, ring=1, checkpoint="attention")

    assert found(loads / 0.95 + 1, fsdp=False).fits
    small = found(loads / 0.95 - 1, fsdp=False)
    assert not small.fits
    assert "needs 60 GiB while loading (every process holds the whole model) of" in str(
        small.reason
    )
    assert small.shortfall == pytest.approx(loads / (loads - 0.95))
    assert found(1, fsdp=True).fits
    assert found(1, fsdp=True).loading_bytes == 4 * (4 * 2**23 + 32 * LAYER_OBJECTS_BYTES)


def test_the_longest_row_fits_in_the_way_that_is_fastest_for_it() -> None:
    """Over PCIe a ring is faster from half a million tokens on, and takes more memory."""
    config = NAMED["Qwen/Qwen3-32B"].config()
    config.num_hidden_layers, config.layer_types = 8, ["full_attention"] * 8
    cluster = parse_cluster("8xRTX4090", 64)
    job = Job(shape=shape_of(config, "qwen"), cluster=cluster, seq_len=2, lora=True)
    found = fastest_shared(replace(job, seq_len=longest(job)))
    assert found is not None
    assert found.candidate.sequence_degree == 8


def test_the_longest_row_is_not_looked_for_beyond_a_limit() -> None:
    job = llama_job("H200", 2, lora=True)
    assert longest(job, 2**15) == 2**15
    assert longest(job, 2**15 + 1025) == 2**15 + 1024


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    job = llama_job("H200", 2, lora=True)
    most = longest(job)
    assert most > 2**15
    assert any(result.fits for result in search(replace(job, seq_len=most)))
    for more in (1.02, 1.5):
        assert not any(result.fits for result in search(replace(job, seq_len=int(more * most))))


def test_the_nearest_to_fitting_is_so_in_all_that_it_takes() -> None:
    """GPU memory suffices here; the host is too small for offloaded layers."""
    results = search(llama_job("4xH200", 3 * 2**20, host_gib=400))
    assert not any(result.fits for result in results)
    short = [result.shortfall for result in results]
    assert short == sorted(short)
    assert short[0] > 1
    on_host = [result.host_bytes for result in results if "on a host" in str(result.reason)]
    assert on_host[0] == min(on_host) < max(on_host)


def test_what_never_fits_says_so() -> None:
    job: Job = replace(llama_job("H200", 2**14), cluster=NOTHING)
    assert longest(job) == 0
    results = search(job)
    assert not any(result.fits for result in results)
    text = render(results, 0)
    assert "Nothing fits." in text
    assert "do not fit; the nearest:" in text
    assert as_json(results, 0)["max_seq_len"] == 0


def test_the_work_grows_with_the_ways_to_share_a_row_not_with_gpus() -> None:
    """With four times the GPUs, only two more sequence degrees are possible."""

    def simulations(gpus: str) -> int:
        costs.predict.cache_clear()
        with patch.object(costs, "simulate", wraps=costs.simulate) as simulated:
            search(llama_job(gpus, 2**17, num_layers=2))
        return simulated.call_count

    few, many = simulations("8xH100"), simulations("32xH100")
    assert few < many < 2.5 * few


def test_speed_and_mfu_by_hand() -> None:
    job = llama_job("8xH200", 2**17)
    result = result_of(job, ulysses=2, ring=1, checkpoint="attention")
    tokens = 4 * 2**17  # four rows at once
    assert result.rows_at_once == 4
    assert result.tokens_per_second_per_gpu == pytest.approx(tokens / 8 / result.time.total)
    flops = 4 * job.shape.step_flops(2**17) / 8
    assert result.mfu == pytest.approx(flops / result.time.total / 989e12)


def test_an_adapter_has_no_gradients_of_frozen_weights() -> None:
    full, lora = (llama_job("8xH200", 2**15, lora=lora) for lora in (False, True))
    frozen = 2 * full.shape.active_weights * 2**15
    assert full.step_flops - lora.step_flops == frozen
    times = [result_of(j, ulysses=8, ring=1, checkpoint="none").time for j in (full, lora)]
    assert times[1].linear == pytest.approx(times[0].linear * 4 / 6)
    assert times[1].attention == times[0].attention


def test_the_longest_row_does_not_depend_on_the_row_asked_for() -> None:
    assert longest(llama_job("4xH200", 2)) == longest(llama_job("4xH200", 2**21))
