"""The check of the first training step raises on every rank where attention does not cross them,
and is never the cause of a hang."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longctx_patch import PatchHandle, SequenceParallelismError
from longctx_patch.transport import Counters
from tests.harness import run_distributed
from tests.hf.call.first_step import LENGTH, Patched, Scenario, outcomes_of, patched
from tests.hf.tiny import featured_model, token_rows

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


def hanging_scenarios() -> Iterator[tuple[str, Scenario]]:
    for layer in (0, 1):
        scenario = partial(replaced_in, layer=layer, where=SECOND, how=attends_locally)
        yield f"layer {layer}", scenario
    scenario = partial(replaced_in, layer=2, where=SECOND, how=loses_its_forward, family=HYBRID)
    yield "a recurrent layer", scenario
    yield "sdpa", partial(other_implementation, name="sdpa", where=SECOND)


WRONG_NAMES = [name for name, _ in wrong_scenarios()]


def run_wrong(rank: int) -> dict[str, str]:
    return outcomes_of(wrong_scenarios(), rank)


def run_hanging(rank: int) -> dict[str, str]:
    return outcomes_of(hanging_scenarios(), rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    """The outcome of each scenario on each rank; processes start once for all."""
    return run_distributed(run_wrong, 2)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_what_is_wrong_raises_on_every_rank(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        says = found[name]
        assert says.startswith("sequence parallelism did not run as planned"), f"rank {rank}:{says}"
        assert "Patch last" in says
    if name.startswith("layer"):
        layer = name.split()[1]
        assert f"layer {layer}: {2 if 'twice' in name else 0}" in outcomes[0][name]
    if name.startswith("later"):
        assert "the forward of Qwen3_5GatedDeltaNet, recurrent layer 1, is " in outcomes[0][name]


def test_a_replacement_on_one_rank_raises_on_both() -> None:
    """The other rank is told, instead of waiting for keys that are never sent."""
    for rank, found in enumerate(run_distributed(run_hanging, 2)):
        for name, says in found.items():
            assert says.startswith("sequence parallelism did not run"), f"{name}, {rank}: {says}"


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
