"""What is predicted of a model with experts: products of those that a token goes through, and
weights of all."""

from typing import Any

import pytest

from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.named_models import NAMED
from longctx_patch.planner.step_memory import loaded_bytes, states
from longctx_patch.planner.step_time import GROUPED_ROWS, GROUPED_SHARE
from tests.planner.jobs import result_of

TOKENS, LAYERS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 65536, 48, 2048, 768, 128, 8
IN_AN_EXPERT = 3 * HIDDEN * WIDTH
IN_ATTENTION = HIDDEN * 128 * (32 + 2 * 4) + 32 * 128 * HIDDEN
SIDES_OF_ATTENTION = (HIDDEN + 32 * 128) + 2 * (HIDDEN + 4 * 128) + (32 * 128 + HIDDEN)
ROUTER = HIDDEN * EXPERTS


def experts_job(**job: Any) -> Job:
    shape = shape_of(NAMED["Qwen/Qwen3-30B-A3B"].config(), "Qwen3-30B-A3B")
    return Job(shape=shape, cluster=parse_cluster("8xH200"), seq_len=TOKENS, **job)


@pytest.mark.parametrize(
    ("lora", "policy", "times"),
    [(False, "none", 3), (True, "none", 2), (True, "attention", 3), (False, "full", 4)],
)
def test_products_are_those_of_experts_that_a_token_goes_through(
    lora: bool, policy: Any, times: int
) -> None:
    """Forward and each further pass: the input's gradient, the weights' gradient, a recompute."""
    job = experts_job(lora=lora)
    found = result_of(job, ulysses=8, ring=1, checkpoint=policy).time
    tokens, rate = TOKENS / 8, job.cluster.hardware.matmul_flops
    dense = 2 * tokens * (IN_ATTENTION + ROUTER) / rate
    rows = tokens * CHOSEN + EXPERTS * GROUPED_ROWS / 2
    experts = 2 * rows * IN_AN_EXPERT / (GROUPED_SHARE * rate)
    assert found.linear == pytest.approx(times * LAYERS * (dense + experts))
    head = 151936 * HIDDEN
    flops = 6 * TOKENS * (LAYERS * (IN_ATTENTION + ROUTER + CHOSEN * IN_AN_EXPERT) + head)
    assert job.shape.step_flops(TOKENS) == flops + 6 * LAYERS * TOKENS**2 * 32 * 128


@pytest.mark.parametrize("chosen", [0, 129])
def test_an_impossible_number_of_chosen_experts_is_refused(chosen: int) -> None:
    config = NAMED["Qwen/Qwen3-30B-A3B"].config()
    config.num_experts_per_tok = chosen
    with pytest.raises(ValueError, match="num_local_experts=128"):
        shape_of(config, "some")


def test_experts_stay_in_16_bits_beside_weights_of_4() -> None:
    """`replace_with_bnb_linear` takes linear modules: nobody's experts fit a card by it."""
    job = experts_job(lora=True, fsdp=False, dtype="nf4")
    assert loaded_bytes(job) > 2 * LAYERS * EXPERTS * IN_AN_EXPERT
    assert loaded_bytes(job) < loaded_bytes(experts_job(lora=True, fsdp=False))


def test_weights_and_adapters_are_those_of_all_experts() -> None:
    job = experts_job(lora=True, lora_rank=16)
    sides = (
        SIDES_OF_ATTENTION
        + EXPERTS * (2 * (HIDDEN + 2 * WIDTH) + WIDTH + HIDDEN)
        + HIDDEN
        + EXPERTS
    )
    assert job.trained_weights == 16 * LAYERS * sides == 996_507_648  # as PEFT makes them
    weights, gradients, optimizer = states(job)
    assert (gradients, optimizer) == (4 * job.trained_weights / 8, 8 * job.trained_weights / 8)
    assert weights == (2 * job.shape.num_weights + 4 * job.trained_weights) / 8
    kept, again = (
        result_of(job, ulysses=8, ring=1, checkpoint=policy).memory.weights
        for policy in ("none", "full")
    )
    factors = 2 * 16 * EXPERTS * (2 * (HIDDEN + 2 * WIDTH) + WIDTH + HIDDEN)  # of one layer
    assert kept - again == pytest.approx(LAYERS * factors)
