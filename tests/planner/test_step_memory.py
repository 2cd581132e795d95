"""Predicted bytes by component: their sums and signs, and which settings take less."""

from dataclasses import replace
from functools import partial

import pytest

from longctx_patch.memory.limits import AHEAD
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.planner.job import Job
from longctx_patch.planner.layer_bytes import layer_bytes
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.search import search
from longctx_patch.planner.step_memory import states
from longctx_patch.planner.step_time import predict_attention
from tests.planner.jobs import candidate, llama_job, llama_shape, result_of


def peak(job: Job, checkpoint: CheckpointPolicy, degree: int | None = None) -> float:
    ulysses = min(degree or job.cluster.num_gpus, 8)
    ring = (degree or job.cluster.num_gpus) // ulysses
    return result_of(job, ulysses=ulysses, ring=ring, checkpoint=checkpoint).memory.total


@pytest.mark.parametrize("lora", [False, True])
def test_components_sum_to_the_total_and_none_is_negative(lora: bool) -> None:
    for result in search(llama_job("4xH200", 100_003, lora=lora)):
        parts = result.memory.parts()
        assert result.memory.total == sum(parts.values())
        assert min(parts.values()) >= 0
        assert min(result.time.parts().values()) >= 0
        assert result.host_bytes >= 0


def test_states_of_full_training_by_hand() -> None:
    weights = 8_030_261_248
    # States are float32 under FSDP2, and else have the dtype of the loaded weights.
    assert states(llama_job("4xH200", 1024)) == (weights, weights, 2 * weights)
    assert states(llama_job("H200", 1024)) == (4 * weights, 4 * weights, 8 * weights)
    alone = states(llama_job("H200", 1024, fsdp=False))
    assert alone == (2 * weights, 2 * weights, 4 * weights)


def test_states_of_an_adapter_by_hand() -> None:
    sides = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    adapter = 16 * 32 * sides
    job = llama_job("8xH200", 1024, lora=True, lora_rank=16)
    assert job.trained_weights == adapter == 41_943_040
    frozen = 2 * llama_shape().num_weights
    assert states(job) == ((4 * adapter + frozen) / 8, 4 * adapter / 8, 8 * adapter / 8)


def test_states_of_embeddings_and_norms_beside_an_adapter_by_hand() -> None:
    job = llama_job("8xH200", 1024, lora=True, lora_rank=16)
    more = replace(job, also_train=("embeddings", "norms"))
    copies = 128_256 * 4096 + 65 * 4096
    assert more.trained_weights - job.trained_weights == copies
    assert [8 * (a - b) for a, b in zip(states(more), states(job), strict=True)] == [
        4 * copies,
        4 * copies,
        8 * copies,
    ]
    assert not more.trains_head
    tied = replace(
        more, shape=replace(job.shape, num_weights=job.shape.num_weights - 128_256 * 4096)
    )
    assert tied.trains_head
    assert tied.step_flops > more.step_flops


def test_adapters_keep_tensors_of_their_rank_beside_the_layer() -> None:
    def kept(gpus: str, lora: bool, fsdp: bool = True) -> float:
        job = llama_job(gpus, 2**17, lora=lora, fsdp=fsdp)
        return layer_bytes(job, candidate(), job.shape.layers[0]).whole

    small = 7 * 2 * 16
    assert kept("4xH200", True) == kept("4xH200", False) + small
    assert kept("H200", True) == kept("H200", False) + small
    assert kept("H200", True, fsdp=False) == kept("H200", False) + small
    in_4_bits = llama_job("H200", 2**17, lora=True, fsdp=False, dtype="nf4")
    wide = layer_bytes(in_4_bits, candidate(), in_4_bits.shape.layers[0]).whole
    assert wide == kept("H200", False) + small + 3 * 2 * 4096


@pytest.mark.parametrize("checkpoint", ["none", "attention", "offload", "full"])
@pytest.mark.parametrize("lora", [False, True])
def test_more_gpus_never_take_more_of_each(checkpoint: CheckpointPolicy, lora: bool) -> None:
    peaks = [
        peak(llama_job(f"{gpus}xH200", 2**19, lora=lora), checkpoint) for gpus in (2, 4, 8, 16, 32)
    ]
    assert peaks == sorted(peaks, reverse=True)
    shared = [peak(llama_job("8xH200", 2**19, lora=lora), checkpoint, n) for n in (1, 2, 4, 8)]
    assert shared == sorted(shared, reverse=True)


def test_states_on_the_host_leave_the_gpu() -> None:
    job = llama_job("16xH100", 2**17)
    on_gpu, on_host = (
        result_of(job, ulysses=8, ring=2, checkpoint="attention", offload_states=moved)
        for moved in (False, True)
    )
    # The states take 16 bytes per weight, and each machine of 8 GPUs holds half of them.
    assert on_host.host_bytes == 16 * llama_shape().num_weights / 2
    assert on_gpu.host_bytes == on_host.memory.optimizer == 0
    assert on_host.memory.total < on_gpu.memory.total
    assert on_host.memory.checkpoints == on_gpu.memory.checkpoints
    assert on_host.time.optimizer > on_gpu.time.optimizer


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_is_not_kept_of_attention_leaves_gpu_and_host(share: float) -> None:
    job = llama_job("4xH200", 2**20)
    host, kept = (
        result_of(job, ulysses=4, ring=1, checkpoint=policy, attention_kept=share)
        for policy in ("offload", "attention")
    )
    per_token = 2 * 4096 + share * (2 * 4096 + 4 * 32)
    assert host.host_bytes == 32 * 2**20 * per_token
    assert kept.memory.checkpoints == 31 * 2**18 * per_token
    whole = result_of(job, ulysses=4, ring=1, checkpoint="attention")
    forward = predict_attention(job, whole.candidate.setting).forward.makespan_s
    again = kept.time.attention - whole.time.attention
    assert again == pytest.approx(32 * (1 - share) ** 2 * forward)


def test_layers_too_large_to_come_ahead_come_when_they_are_asked_for() -> None:
    def coming(tokens: int) -> float:
        job = llama_job("1xH200", tokens, lora=True)
        found = result_of(job, ulysses=1, ring=1, checkpoint="offload", mlp_tiles=8)
        return found.memory.checkpoints

    per_token = 4 * 4096 + 4 * 32
    most = AHEAD * llama_job("1xH200", 2).cluster.hardware.memory_bytes / per_token
    assert coming(int(most)) == int(most) * per_token
    assert coming(int(most) + 1) == 0


def test_weights_of_four_bits_are_an_adapters_and_whole_on_each_gpu() -> None:
    for wrong in ({"fsdp": False}, {"lora": True}):
        with pytest.raises(ValueError, match="dtype='nf4' is for the frozen weights"):
            llama_job("4xH200", 1024, dtype="nf4", **wrong)
    job = llama_job("4xH200", 1024, dtype="nf4", lora=True, fsdp=False)
    narrow = 32 * job.shape.layers[0].linear_weights
    frozen = 0.516 * narrow + 2 * (job.shape.num_weights - narrow)
    assert states(job)[0] == pytest.approx(4 * job.trained_weights + frozen)


def test_a_share_has_the_plans_of_its_layout_and_lies_beside_the_recompute() -> None:
    job = llama_job("4xH200", 2**17)
    ring = partial(result_of, job, ulysses=1, ring=4, checkpoint="attention")
    plans = {share: ring(attention_kept=share).candidate.setting.plan for share in (1.0, 0.5)}
    assert plans[0.5] != plans[1.0]
    assert plans[0.5] in ("striped", "burst", "double_ring")
    layers = {
        share: result_of(
            job, ulysses=4, ring=1, checkpoint="attention", attention_kept=share
        ).memory.layer
        for share in (1.0, 0.5, 0.0)
    }
    of_half = 0.5 * (2 * 4096 + 4 * 32) * 2**15
    assert layers[0.5] - layers[1.0] == pytest.approx(of_half)
    assert layers[0.0] == layers[1.0]


def test_logits_are_a_chunk() -> None:
    job = llama_job("4xH200", 2**17, num_layers=8)
    short = llama_job("4xH200", 2**12, num_layers=8)
    found = [
        result_of(each, ulysses=4, ring=1, checkpoint="none").memory.logits for each in (job, short)
    ]
    assert found == [2 * GIB, 4 * 128256 * 2**10]


def test_weights_in_float32_on_one_gpu_take_twice_and_their_copies() -> None:
    """FSDP2 makes trained weights float32 anyway, so only an adapter's frozen ones take more."""
    narrow, wide = (
        replace(llama_job("1xH200", 2**14), dtype=dtype, fsdp=False)
        for dtype in ("bfloat16", "float32")
    )
    assert sum(states(wide)) == 2 * sum(states(narrow))
    weights = [
        result_of(job, ulysses=1, ring=1, checkpoint="none").memory for job in (narrow, wide)
    ]
    copies = 2 * narrow.shape.active_weights
    assert weights[1].weights - weights[0].weights == pytest.approx(
        2 * narrow.shape.num_weights + copies
    )
    for lora in (False, True):
        of_two = [
            replace(llama_job("2xH200", 2**14), dtype=dtype, lora=lora)
            for dtype in ("bfloat16", "float32")
        ]
        more = sum(states(of_two[1])) - sum(states(of_two[0]))
        assert more == (narrow.shape.num_weights if lora else 0)  # 2 bytes per weight, over 2 GPUs
