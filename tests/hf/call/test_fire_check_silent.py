"""The check of the first training step is silent where attention crosses the ranks, whatever is
trained, wrapped, frozen or evaluated between."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import patch
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.call.first_step import FINE, Scenario, outcome, patched, with_adapter

POLICIES: tuple[CheckpointPolicy, ...] = ("none", "full", "attention")


def lora_on(*modules: str, layer: int | None = None) -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=list(modules), layers_to_transform=None if layer is None else [layer]
    )


# Scenarios take two steps, because backward is checked when the next forward begins.


def plain(
    family: str, policy: CheckpointPolicy, ulysses: int = 1, lora: LoraConfig | None = None
) -> None:
    it = patched(family, policy, ulysses=ulysses, lora=lora)
    loss = it.loss()
    sent = it.handle.counters
    forward = f"sent {sent.messages} messages with {sent.bytes:,} bytes in forward, as planned"
    says = str(it.handle.first_step)
    assert says.startswith("<first step: 2 of 2 layers over 2 rank(s), mask: ")
    assert says.endswith(f"rank {it.handle.group_rank} {forward}; no backward yet>")
    loss.backward()
    assert forward in str(it.handle.first_step)
    it.steps(1)


def adapter_after_patch() -> None:
    it = patched("qwen2", "attention")
    it.model = with_adapter(it.model, lora_on("q_proj", layer=1))
    it.steps(2)


def trained_alone(part: str, policy: CheckpointPolicy) -> None:
    """Train only `part`. With the upper layer, the lower one has no backward. With the MLPs, the
    first attention needs no backward, but recomputing its layer runs its forward again."""
    it = patched(policy=policy)
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_(part in name)
    it.steps(2)


def checkpointing_of_the_users_own() -> None:
    it = patched()
    for layer in it.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: (
            torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        )
    it.steps(2)


def accumulation() -> None:
    patched("gpt_oss").steps(3)


def two_forwards_one_backward() -> None:
    it = patched()
    (it.loss() + it.loss()).backward()
    it.steps(1)


def evaluation_first_and_between() -> None:
    it = patched("qwen2")

    def evaluate() -> None:
        it.model.eval()
        with torch.no_grad():
            it.loss()
        it.model.train()

    evaluate()
    assert it.handle.first_step is None
    loss = it.loss()
    evaluate()
    loss.backward()
    evaluate()
    it.steps(1)


def counters_reset_between_steps() -> None:
    """Users call `handle.counters.reset()` to count one step."""
    it = patched()
    for _ in range(3):
        it.handle.counters.reset()
        it.steps(1)


def under_autocast() -> None:
    """Under autocast messages are in the dtype of attention's inputs."""
    it = patched()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = it.loss()
        loss.backward()


def under_ddp() -> None:
    it = patched()
    it.model = DistributedDataParallel(it.model)
    it.steps(2)


def patched_again() -> None:
    it = patched()
    it.steps(1)
    it.handle.unpatch()
    it.handle = patch(it.model, it.handle.config)
    it.steps(2)


def one_rank_evaluates_whole_rows(rank: int) -> None:
    """Forward passes of whole rows send nothing, so one rank may run them alone."""
    it = patched()
    it.steps(1)
    if rank == 0:
        it.model.eval()
        with torch.no_grad():
            it.model(input_ids=torch.tensor([[1, 2, 3]]))
        it.model.train()
    dist.barrier()
    it.steps(1)


def backward_that_failed_first(rank: int) -> None:
    """A backward that failed sent less than planned; this isn't blamed on attention."""
    it = patched()
    loss = it.loss()
    broken = mock.patch("longctx_patch.engine.autograd.usp_backward", side_effect=MemoryError)
    with broken, pytest.raises(MemoryError):
        loss.backward()
    it.steps(2)


def without_rank(function: Callable[..., None], *args: Any) -> Scenario:
    return lambda rank: function(*args)


def fine_scenarios() -> Iterator[tuple[str, Scenario]]:
    for number, policy in enumerate(POLICIES):
        family = ("llama", "qwen2", "gpt_oss")[number]
        yield f"{family}, {policy}", without_rank(plain, family, policy)
        yield f"ulysses, {policy}", without_rank(plain, "gpt_oss", policy, 2)
        lora = lora_on("v_proj", layer=number % 2)
        yield f"LoRA on layer {number % 2}, {policy}", without_rank(plain, "llama", policy, 1, lora)
        for part in ("layers.1", "mlp"):
            yield f"{part} alone, {policy}", without_rank(trained_alone, part, policy)
    yield "head alone", without_rank(trained_alone, "lm_head", "none")
    lora = lora_on("q_proj", layer=0)
    yield "LoRA under ulysses", without_rank(plain, "llama", "attention", 2, lora)
    yield "LoRA after attention", without_rank(plain, "llama", "full", 1, lora_on("o_proj"))
    for function in (
        adapter_after_patch,
        checkpointing_of_the_users_own,
        accumulation,
        two_forwards_one_backward,
        evaluation_first_and_between,
        counters_reset_between_steps,
        under_autocast,
        under_ddp,
        patched_again,
    ):
        yield function.__name__.replace("_", " "), without_rank(function)
    yield "after a backward that failed", backward_that_failed_first


FINE_NAMES = [name for name, _ in fine_scenarios()]


def run_fine(rank: int) -> dict[str, str]:
    return {name: outcome(scenario, rank) for name, scenario in fine_scenarios()}


def run_stock_alone(rank: int) -> str:
    return outcome(one_rank_evaluates_whole_rows, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    """The outcome of each scenario on each rank; processes start once for all."""
    return run_distributed(run_fine, 2)


@pytest.mark.parametrize("name", FINE_NAMES)
def test_what_is_fine_passes(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        assert found[name] == FINE, f"rank {rank}: {found[name]}"


def test_stock_forward_passes_of_one_rank_wait_for_nobody() -> None:
    assert run_distributed(run_stock_alone, 2) == [FINE, FINE]
