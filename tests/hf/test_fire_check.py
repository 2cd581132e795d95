"""The check of the first training step: silent where attention crosses the ranks, loud on every
rank where it does not, and never the cause of a hang."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    SequenceParallelismError,
    SequenceShardCollator,
    patch,
)
from longctx_patch.config import CheckpointPolicy
from longctx_patch.transport import Counters
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, token_rows

LENGTH = 24
POLICIES: tuple[CheckpointPolicy, ...] = ("none", "full", "attention")
FINE = "fine"
BOTH, SECOND = (0, 1), (1,)
"""Ranks on which something is done to the model."""


class Patched(NamedTuple):
    """A patched model on two ranks."""

    model: Any
    handle: PatchHandle
    collate: SequenceShardCollator

    def loss(self, length: int = LENGTH) -> Tensor:
        return self.model(**self.collate(token_rows(length))).loss

    def step(self) -> None:
        self.loss().backward()

    def attention(self, layer: int) -> Any:
        return self.handle.model.model.layers[layer].self_attn


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
    config = LongContextConfig(ulysses_degree=ulysses, ring_degree=2 // ulysses, checkpoint=policy)
    handle = patch(model, config)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    return Patched(model, handle, collate)


def with_adapter(model: Any, lora: LoraConfig) -> Any:
    """Its second factor is 0 at first, and so would be the gradient of the first."""
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    return model


def lora_on(*modules: str, layer: int | None = None) -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=list(modules), layers_to_transform=None if layer is None else [layer]
    )


# What is fine: two steps, because backward is checked when the next forward begins.


def plain(family: str, policy: CheckpointPolicy, ulysses: int) -> None:
    it = patched(family, policy, ulysses=ulysses)
    it.step()
    assert it.handle.first_step is not None
    it.step()


def adapted(lora: LoraConfig, policy: CheckpointPolicy, ulysses: int = 1) -> None:
    it = patched(policy=policy, lora=lora, ulysses=ulysses)
    it.step()
    it.step()


def adapter_after_patch() -> None:
    it = patched("qwen2", "attention")
    it = it._replace(model=with_adapter(it.model, lora_on("q_proj", layer=1)))
    it.step()
    it.step()


def frozen_below(policy: CheckpointPolicy) -> None:
    """The lower layer has no backward at all."""
    it = patched(policy=policy)
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    it.step()
    it.step()


def nothing_trained_in_attention(policy: CheckpointPolicy) -> None:
    """Its backward is not needed in the first layer, but recomputing the layer runs it again."""
    it = patched(policy=policy)
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    it.step()
    it.step()


def head_trained_alone() -> None:
    it = patched()
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    it.step()
    it.step()


def checkpointing_of_the_users_own() -> None:
    it = patched()
    for layer in it.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: (
            torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        )
    it.step()
    it.step()


def accumulation() -> None:
    it = patched("gpt_oss")
    for _ in range(3):
        it.step()


def two_forwards_one_backward() -> None:
    it = patched()
    (it.loss() + it.loss()).backward()
    it.step()


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
    it.step()


def counters_reset_between_steps() -> None:
    """`handle.counters.reset()` is public, and used to count one step."""
    it = patched()
    for _ in range(3):
        it.handle.counters.reset()
        it.step()


def under_autocast() -> None:
    """Messages are in the dtype that attention got."""
    it = patched()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = it.loss()
        loss.backward()


def under_ddp() -> None:
    it = patched()
    it = it._replace(model=DistributedDataParallel(it.model))
    it.step()
    it.step()


def patched_again() -> None:
    it = patched()
    it.step()
    it.handle.unpatch()
    it = it._replace(handle=patch(it.model, it.handle.config))
    it.step()
    it.step()


def one_rank_evaluates_whole_rows(rank: int) -> None:
    """Stock forward passes send nothing, so one rank may do them while the other waits."""
    it = patched()
    it.step()
    if rank == 0:
        it.model.eval()
        with torch.no_grad():
            it.model(input_ids=torch.tensor([[1, 2, 3]]))
        it.model.train()
    dist.barrier()
    it.step()


# What is not.


def skips_attention(module: nn.Module) -> None:
    """As a patch of another library might: the layer runs, and tokens are not mixed."""
    module.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)


def attends_locally(module: nn.Module) -> None:
    """Within this rank's shard, with a loss that looks plausible."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.cumsum(hidden_states, 1), None

    module.forward = forward


def runs_twice(module: nn.Module) -> None:
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stock(*args, **kwargs)
        return stock(*args, **kwargs)

    module.forward = forward


def replaced_in(rank: int, layer: int, where: tuple[int, ...], how: Callable[..., None]) -> None:
    it = patched("qwen2")
    if rank in where:
        how(it.attention(layer))
    it.step()


def other_implementation(rank: int, name: str, where: tuple[int, ...]) -> None:
    it = patched()
    if rank in where:
        it.model.set_attn_implementation(name)
    it.step()


def sends_unseen(rank: int, where: tuple[int, ...]) -> None:
    """Counters that do not see what is sent prove nothing."""
    it = patched()
    if rank in where:
        object.__setattr__(it.handle.group, "counters", Counters())
    it.step()


def backward_elsewhere(rank: int, where: tuple[int, ...]) -> None:
    """Forward as planned, backward with a message more."""
    it = patched()
    loss = it.loss()
    if rank in where:
        it.handle.counters.sent(8)
    loss.backward()
    it.step()


def refused_batch_first(rank: int) -> None:
    """A batch that was refused is no step: the check is of the next one."""
    it = patched()
    batch = it.collate(token_rows(LENGTH))
    with pytest.raises(ValueError, match="sparse=True with a sharded batch"):
        it.model(**batch, sparse=True)
    skips_attention(it.attention(1))
    it.step()
    it.step()


def backward_that_failed_first(rank: int) -> None:
    """What was sent until then is less than was planned, which is no fault of attention's."""
    it = patched()
    loss = it.loss()
    broken = mock.patch("longctx_patch.operator.run_backward", side_effect=MemoryError)
    with broken, pytest.raises(MemoryError):
        loss.backward()
    it.step()
    it.step()


def forward_that_failed_first(rank: int) -> None:
    """Nor is one that ended in an error, out of memory say."""
    it = patched()
    layer = it.handle.model.model.layers[1]

    def fail(*args: Any) -> None:
        raise MemoryError

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        it.loss()
    hook.remove()
    skips_attention(it.attention(1))
    it.step()
    it.step()


Scenario = Callable[[int], None]


def without_rank(function: Callable[..., None], *args: Any) -> Scenario:
    return lambda rank: function(*args)


def fine_scenarios() -> Iterator[tuple[str, Scenario]]:
    for policy in POLICIES:
        for family in ("llama", "qwen2", "gpt_oss"):
            yield f"{family}, {policy}", without_rank(plain, family, policy, 1)
        yield f"ulysses, {policy}", without_rank(plain, "gpt_oss", policy, 2)
        for layer in (0, 1):
            lora = lora_on("v_proj", layer=layer)
            yield f"LoRA on layer {layer}, {policy}", without_rank(adapted, lora, policy)
        yield (
            f"LoRA under ulysses, {policy}",
            without_rank(adapted, lora_on("q_proj", layer=0), policy, 2),
        )
        yield f"frozen below, {policy}", without_rank(frozen_below, policy)
        yield f"LoRA after attention, {policy}", without_rank(adapted, lora_on("o_proj"), policy)
        yield f"frozen attention, {policy}", without_rank(nothing_trained_in_attention, policy)
    for function in (
        adapter_after_patch,
        head_trained_alone,
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


def wrong_scenarios() -> Iterator[tuple[str, Scenario]]:
    for layer in (0, 1):
        for how in (skips_attention, attends_locally, runs_twice):
            scenario = partial(replaced_in, layer=layer, where=BOTH, how=how)
            yield f"layer {layer} {how.__name__}", scenario
    for name in ("sdpa", "eager"):
        yield f"{name} everywhere", partial(other_implementation, name=name, where=BOTH)
    for where in (BOTH, SECOND):
        yield f"unseen on {where}", partial(sends_unseen, where=where)
        yield f"backward on {where}", partial(backward_elsewhere, where=where)
    yield "after a refused batch", refused_batch_first
    yield "after a forward that failed", forward_that_failed_first


def hanging_scenarios() -> Iterator[tuple[str, Scenario]]:
    for layer in (0, 1):
        scenario = partial(replaced_in, layer=layer, where=SECOND, how=attends_locally)
        yield f"layer {layer}", scenario
    yield "sdpa", partial(other_implementation, name="sdpa", where=SECOND)


FINE_NAMES = [name for name, _ in fine_scenarios()]
WRONG_NAMES = [name for name, _ in wrong_scenarios()]


def outcome(scenario: Scenario, rank: int) -> str:
    try:
        scenario(rank)
    except SequenceParallelismError as error:
        return str(error)
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    return FINE


def run_all(rank: int) -> dict[str, str]:
    scenarios = {**dict(fine_scenarios()), **dict(wrong_scenarios())}
    return {name: outcome(scenario, rank) for name, scenario in scenarios.items()}


def run_hanging(rank: int) -> dict[str, str]:
    return {name: outcome(scenario, rank) for name, scenario in hanging_scenarios()}


def run_stock_alone(rank: int) -> str:
    return outcome(one_rank_evaluates_whole_rows, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    """By rank, from one start of the processes."""
    return run_distributed(run_all, 2, timeout_s=90)


@pytest.mark.parametrize("name", FINE_NAMES)
def test_what_is_fine_passes(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        assert found[name] == FINE, f"rank {rank}: {found[name]}"


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_what_is_wrong_raises_on_every_rank(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        says = found[name]
        assert says.startswith("sequence parallelism did not run as planned"), f"rank {rank}:{says}"
        assert "Patch last" in says
    if name.startswith("layer"):
        layer = name.split()[1]
        assert f"layer {layer}: {2 if 'twice' in name else 0}" in outcomes[0][name]


def test_a_replacement_on_one_rank_raises_on_both() -> None:
    """The other rank waits for keys that are never sent, unless something tells it."""
    for rank, found in enumerate(run_distributed(run_hanging, 2, timeout_s=30)):
        for name, says in found.items():
            assert says.startswith("sequence parallelism did not run"), f"{name}, {rank}: {says}"


def test_stock_forward_passes_of_one_rank_wait_for_nobody() -> None:
    assert run_distributed(run_stock_alone, 2, timeout_s=30) == [FINE, FINE]


def first_step_alone(attend: Callable[[nn.Module], None] | None = None) -> PatchHandle:
    """Of a packed row in this process; `attend` replaces the upper layer's attention."""
    model = featured_model("gpt_oss")
    handle = patch(model, LongContextConfig())
    collate = SequenceShardCollator(handle.config, group_rank=0, pad_token_id=0)
    (row,) = token_rows(LENGTH, num_rows=1)
    if attend is not None:
        attend(model.model.layers[1].self_attn)
    model(**collate([{**row, "seq_lengths": [5, 19]}])).loss.backward()
    return handle


def test_one_rank_with_packed_rows_is_checked_too() -> None:
    """There attention must keep documents apart, though nothing is sent."""
    handle = first_step_alone()
    assert handle.first_step is not None
    assert handle.first_step.masks == "window 7, 2 documents, sinks + causal, 2 documents, sinks"
    assert handle.counters.messages == 0
    with pytest.raises(SequenceParallelismError, match="layer 1: 0"):
        first_step_alone(attends_locally)
