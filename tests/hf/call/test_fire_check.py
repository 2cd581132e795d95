"""The check of the first training step raises on every rank where attention does not cross them,
and is never the cause of a hang. It is silent where attention crosses them, whatever is trained,
wrapped, frozen or evaluated between."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import PatchHandle, SequenceParallelismError, patch
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.transport import Counters
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, token_rows
from tests.memory.trained import Trained

LENGTH = 24
FINE = "fine"
Scenario = Callable[[int], None]


class Patched(Trained):
    """A patched model on two ranks."""

    def steps(self, count: int) -> None:
        """Forward and backward `count` times; gradients add up."""
        for _ in range(count):
            self.loss().backward()

    def attention(self, layer: int) -> Any:
        """The module in which tokens meet, which a recurrent layer has in place of attention."""
        return transformers_api.mixing_modules(self.handle.model)[layer][0]


def patched(
    family: str = "llama",
    policy: CheckpointPolicy = "none",
    *,
    ulysses: int = 1,
    lora: LoraConfig | None = None,
) -> Patched:
    model = featured_model(family)
    if lora is not None:
        model = with_adapter(model, lora)
    degrees: dict[str, Any] = {"ulysses_degree": ulysses, "ring_degree": 2 // ulysses}
    return Patched(model, length=LENGTH, checkpoint=policy, **degrees)


def with_adapter(model: Any, lora: LoraConfig) -> Any:
    """Wrap a model by PEFT. The second factor of its adapters begins at 1; at 0, the usual value,
    the first factor would have no gradient."""
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    return model


def outcome(scenario: Scenario, rank: int) -> str:
    try:
        scenario(rank)
    except SequenceParallelismError as error:
        return str(error)
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    return FINE


def outcomes_of(scenarios: Iterable[tuple[str, Scenario]], rank: int) -> dict[str, str]:
    return {name: outcome(scenario, rank) for name, scenario in scenarios}


# What is fine.


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
    yield "whole rows of one rank", one_rank_evaluates_whole_rows


# What is wrong.

BOTH, SECOND = (0, 1), (1,)
"""Ranks on which something is done to the model."""


def skips_attention(module: nn.Module) -> None:
    """Replace attention as another library's patch might: the layer runs, tokens don't mix."""
    module.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)


def attends_locally(module: nn.Module) -> None:
    """Replace attention by one within this rank's shard; the loss still looks plausible."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.cumsum(hidden_states, 1), None

    module.forward = forward


def runs_twice(module: nn.Module) -> None:
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stock(*args, **kwargs)
        return stock(*args, **kwargs)

    module.forward = forward


def loses_its_forward(module: nn.Module) -> None:
    """The forward of its class runs again, as after another library's `del module.forward`."""
    del vars(module)["forward"]


def mixes_locally(module: nn.Module) -> None:
    """`attends_locally` of a recurrent layer."""
    module.forward = lambda hidden_states, *args, **kwargs: torch.cumsum(hidden_states, 1)


HYBRID = "qwen3_5_text"
"""Recurrent layers around one with attention."""


def replaced_in(
    rank: int,
    layer: int,
    where: tuple[int, ...],
    how: Callable[..., None],
    family: str = "qwen2",
    steps_before: int = 0,
) -> None:
    it = patched(family)
    it.steps(steps_before)
    if rank in where:
        how(it.attention(layer))
    it.steps(1)


def other_implementation(rank: int, name: str, where: tuple[int, ...]) -> None:
    it = patched()
    if rank in where:
        it.model.set_attn_implementation(name)
    it.steps(1)


def sends_unseen(rank: int, where: tuple[int, ...]) -> None:
    """The group counts in other counters than the transport, so nothing seems to be sent."""
    it = patched()
    if rank in where:
        object.__setattr__(it.handle.group, "counters", Counters())
    it.steps(1)


def backward_elsewhere(rank: int, where: tuple[int, ...]) -> None:
    """Forward sends what is planned, backward seems to send one message more."""
    it = patched()
    loss = it.loss()
    if rank in where:
        it.handle.counters.sent(8)
    loss.backward()
    it.steps(1)


def refused_batch_first(rank: int) -> None:
    """A refused batch is no step: the check is of the step after it."""
    it = patched()
    batch = it.collate(token_rows(LENGTH))
    with pytest.raises(ValueError, match="sparse=True with a sharded batch"):
        it.model(**batch, sparse=True)
    skips_attention(it.attention(1))
    it.steps(2)


def forward_that_failed_first(rank: int) -> None:
    """A forward that ended in an error (out of memory, say) is no step either."""
    it = patched()
    layer = it.handle.model.model.layers[1]

    def fail(*args: Any) -> None:
        raise MemoryError

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        it.loss()
    hook.remove()
    skips_attention(it.attention(1))
    it.steps(2)


def wrong_scenarios() -> Iterator[tuple[str, Scenario]]:
    for layer, how in ((0, skips_attention), (1, attends_locally), (0, runs_twice)):
        scenario = partial(replaced_in, layer=layer, where=BOTH, how=how)
        yield f"layer {layer} {how.__name__}", scenario
    for layer, how in ((0, loses_its_forward), (2, mixes_locally), (2, runs_twice)):
        scenario = partial(replaced_in, layer=layer, where=BOTH, how=how, family=HYBRID)
        yield f"layer {layer} {how.__name__} and is recurrent", scenario
    for how in (loses_its_forward, mixes_locally):
        scenario = partial(
            replaced_in, layer=2, where=SECOND, how=how, family=HYBRID, steps_before=1
        )
        yield f"later, a recurrent layer {how.__name__}", scenario
    for name in ("sdpa", "eager"):
        yield f"{name} everywhere", partial(other_implementation, name=name, where=BOTH)
    for where in (BOTH, SECOND):
        yield f"unseen on {where}", partial(sends_unseen, where=where)
        yield f"backward on {where}", partial(backward_elsewhere, where=where)
    yield "after a refused batch", refused_batch_first
    yield "after a forward that failed", forward_that_failed_first
    for layer in (0, 1):
        scenario = partial(replaced_in, layer=layer, where=SECOND, how=attends_locally)
        yield f"on one rank, layer {layer}", scenario
    scenario = partial(replaced_in, layer=2, where=SECOND, how=loses_its_forward, family=HYBRID)
    yield "on one rank, a recurrent layer", scenario
    yield "on one rank, sdpa", partial(other_implementation, name="sdpa", where=SECOND)


def run_fine(rank: int) -> dict[str, str]:
    return outcomes_of(fine_scenarios(), rank)


def run_wrong(rank: int) -> dict[str, str]:
    return outcomes_of(wrong_scenarios(), rank)


def test_what_is_fine_passes() -> None:
    for rank, found in enumerate(run_distributed(run_fine, 2)):
        assert found == dict.fromkeys(found, FINE), rank
        assert len(found) > 25


def test_what_is_wrong_raises_on_every_rank() -> None:
    """Where attention is replaced on one rank the other is told, instead of waiting for keys that
    are never sent."""
    outcomes = run_distributed(run_wrong, 2)
    for name, rank in product(outcomes[0], range(2)):
        says = outcomes[rank][name]
        assert says.startswith("sequence parallelism did not run as planned"), f"{name}, {says}"
        assert "Patch last" in says, f"{name}, {says}"
        if name.startswith("layer"):
            layer = name.split()[1]
            assert f"layer {layer}: {2 if 'twice' in name else 0}" in says
        if name.startswith("later"):
            assert "the forward of Qwen3_5GatedDeltaNet, recurrent layer 1, is " in says


def first_step_alone(attend: Callable[[nn.Module], None] | None = None) -> PatchHandle:
    """The first step of a packed row in this process; `attend` replaces the upper attention."""
    it = Patched(featured_model("gpt_oss"))
    if attend is not None:
        attend(it.attention(1))
    packed_loss(it).backward()
    return it.handle


def test_one_rank_with_packed_rows_is_checked_too() -> None:
    """Over one rank nothing is sent, but attention must keep documents apart, which is checked."""
    handle = first_step_alone()
    assert handle.first_step is not None
    assert handle.first_step.masks == "window 7, 2 documents, sinks + causal, 2 documents, sinks"
    assert handle.counters.messages == 0
    with pytest.raises(SequenceParallelismError, match="layer 1: 0"):
        first_step_alone(attends_locally)


def test_a_recurrent_layer_that_evaluation_finds_replaced_raises() -> None:
    """Before any training step, and after one on one rank."""
    it = Patched(featured_model(HYBRID))
    forward = vars(it.attention(0)).pop("forward")
    it.model.eval()
    with (
        torch.no_grad(),
        pytest.raises(SequenceParallelismError, match="layer 0, is that of its class now"),
    ):
        packed_loss(it)
    it.attention(0).forward = forward
    it.model.train()
    packed_loss(it).backward()
    it.attention(0).forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(SequenceParallelismError, match=r"layer 0, is <function .*> now"):
        packed_loss(it)


def packed_loss(it: Patched) -> Tensor:
    (row,) = token_rows(LENGTH, num_rows=1)
    loss: Tensor = it.model(**it.collate([{**row, "seq_lengths": [5, 19]}])).loss
    return loss
