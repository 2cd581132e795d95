"""The check of the first training step raises on every rank where attention does not cross them,
and is never the cause of a hang. It is silent where attention crosses them, whatever is trained,
wrapped, frozen or evaluated between."""

from collections.abc import Callable, Mapping
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

from longctx_patch import SequenceParallelismError, patch
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.transport import Counters
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, token_rows
from tests.memory.trained import Trained

LENGTH = 24
FINE = "fine"
HYBRID = "qwen3_5_text"
"""Recurrent layers around one with attention."""
Scenario = Callable[[int], None]


class Patched(Trained):
    """A patched model on two ranks."""

    def steps(self, count: int) -> None:
        """Forward and backward `count` times; gradients add up. Backward is checked when the next
        forward begins."""
        for _ in range(count):
            self.loss().backward()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()

    def attention(self, layer: int) -> Any:
        """The module in which tokens meet, which a recurrent layer has in place of attention."""
        return transformers_api.mixing_modules(self.handle.model)[layer][0]


def patched(
    family: str = "llama", policy: CheckpointPolicy = "none", *, ulysses: int = 1
) -> Patched:
    degrees: dict[str, Any] = {"ulysses_degree": ulysses, "ring_degree": 2 // ulysses}
    return Patched(featured_model(family), length=LENGTH, checkpoint=policy, **degrees)


def adapted(it: Patched, module: str, layer: int) -> Patched:
    """Wrap the model by PEFT. The second factor of its adapters begins at 1; at 0, the usual value,
    the first factor would have no gradient."""
    lora = LoraConfig(r=2, target_modules=[module], layers_to_transform=[layer])
    it.model = get_peft_model(it.model, lora)
    for name, parameter in it.model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    return it


def outcomes_of(scenarios: Mapping[str, Scenario], rank: int) -> dict[str, str]:
    """What each scenario raises, or that it is fine."""
    found = {}
    for name, scenario in scenarios.items():
        try:
            scenario(rank)
            found[name] = FINE
        except SequenceParallelismError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"another error: {type(error).__name__}: {error}"
    return found


# What is fine.


def says_what_it_sent(rank: int) -> None:
    it = patched("gpt_oss", "attention")
    loss = it.loss()
    sent = it.handle.counters
    forward = f"sent {sent.messages} messages with {sent.bytes:,} bytes in forward, as planned"
    says = str(it.handle.first_step)
    assert says.startswith("<first step: 2 of 2 layers over 2 rank(s), mask: ")
    assert says.endswith(f"rank {it.handle.group_rank} {forward}; no backward yet>")
    loss.backward()
    assert forward in str(it.handle.first_step)
    it.steps(1)


def trained_alone(rank: int, part: str, policy: CheckpointPolicy) -> None:
    """Train only `part`. With the upper layer, the lower one has no backward. With the MLPs, the
    first attention needs no backward, but recomputing its layer runs its forward again."""
    it = patched(policy=policy)
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_(part in name)
    it.steps(2)


def checkpointing_of_the_users_own(rank: int) -> None:
    it = patched()
    for layer in it.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: (
            torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        )
    it.steps(2)


def two_forwards_one_backward(rank: int) -> None:
    it = patched()
    (it.loss() + it.loss()).backward()
    it.steps(1)


def evaluation_first_and_between(rank: int) -> None:
    it = patched("qwen2")
    it.evaluate()
    assert it.handle.first_step is None
    loss = it.loss()
    it.evaluate()
    loss.backward()
    it.evaluate()
    it.steps(1)


def counters_reset_between_steps(rank: int) -> None:
    """Users call `handle.counters.reset()` to count one step."""
    it = patched()
    for _ in range(3):
        it.handle.counters.reset()
        it.steps(1)


def under_autocast(rank: int) -> None:
    """Under autocast messages are in the dtype of attention's inputs."""
    it = patched()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = it.loss()
        loss.backward()


def under_ddp(rank: int) -> None:
    it = patched()
    it.model = DistributedDataParallel(it.model)
    it.steps(2)


def patched_again(rank: int) -> None:
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


POLICIES: tuple[CheckpointPolicy, ...] = ("none", "full", "attention")
GOOD: dict[str, Scenario] = {
    f"{part} alone, {policy}": partial(trained_alone, part=part, policy=policy)
    for part, policy in product(("layers.1", "mlp", "lm_head"), POLICIES)
} | {
    "LoRA below attention": lambda rank: adapted(patched(policy="full"), "o_proj", 0).steps(2),
    "LoRA after the patch": lambda rank: adapted(patched("qwen2", "attention"), "q_proj", 1).steps(
        2
    ),
    "LoRA under ulysses": lambda rank: adapted(
        patched(policy="attention", ulysses=2), "q_proj", 0
    ).steps(2),
    **{
        function.__name__: function
        for function in (
            says_what_it_sent,
            checkpointing_of_the_users_own,
            two_forwards_one_backward,
            evaluation_first_and_between,
            counters_reset_between_steps,
            under_autocast,
            under_ddp,
            patched_again,
            one_rank_evaluates_whole_rows,
            backward_that_failed_first,
        )
    },
}


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


WRONG: dict[str, Scenario] = {
    "layer 0 skipped": partial(replaced_in, layer=0, where=BOTH, how=skips_attention),
    "layer 1 local": partial(replaced_in, layer=1, where=BOTH, how=attends_locally),
    "layer 0 twice": partial(replaced_in, layer=0, where=BOTH, how=runs_twice),
    "sdpa everywhere": partial(other_implementation, name="sdpa", where=BOTH),
    "sdpa on one rank": partial(other_implementation, name="sdpa", where=SECOND),
    "after a refused batch": refused_batch_first,
    "after a forward that failed": forward_that_failed_first,
    "local on one rank": partial(replaced_in, layer=0, where=SECOND, how=attends_locally),
}
for _where in (BOTH, SECOND):
    WRONG[f"unseen on {_where}"] = partial(sends_unseen, where=_where)
    WRONG[f"backward on {_where}"] = partial(backward_elsewhere, where=_where)
for _where, _layer, _how, _before in (
    (BOTH, 0, loses_its_forward, 0),
    (BOTH, 2, mixes_locally, 0),
    (SECOND, 2, loses_its_forward, 0),
    (SECOND, 2, loses_its_forward, 1),
    (SECOND, 2, mixes_locally, 1),
):
    WRONG[f"{'later, ' * _before}recurrent {_layer} {_how.__name__} on {_where}"] = partial(
        replaced_in, layer=_layer, where=_where, how=_how, family=HYBRID, steps_before=_before
    )


def both_outcomes(rank: int) -> tuple[dict[str, str], dict[str, str]]:
    return outcomes_of(GOOD, rank), outcomes_of(WRONG, rank)


def test_what_is_fine_passes_and_what_is_wrong_raises_on_every_rank() -> None:
    """Where attention is replaced on one rank the other is told, instead of waiting for keys that
    are never sent."""
    for good, wrong in run_distributed(both_outcomes, 2):
        assert good == dict.fromkeys(GOOD, FINE)
        for name, says in wrong.items():
            assert says.startswith("sequence parallelism did not run as planned"), f"{name}, {says}"
            assert "Patch last" in says, f"{name}, {says}"
            if name.startswith("layer"):
                assert f"layer {name.split()[1]}: {2 if 'twice' in name else 0}" in says
            if name.startswith("later"):
                assert "the forward of Qwen3_5GatedDeltaNet, recurrent layer 1, is " in says


def test_one_rank_with_packed_rows_is_checked_too() -> None:
    """Over one rank nothing is sent, but attention must keep documents apart, which is checked."""
    it = Patched(featured_model("gpt_oss"))
    packed_loss(it).backward()
    assert it.handle.first_step is not None
    assert it.handle.first_step.masks == "window 7, 2 documents, sinks + causal, 2 documents, sinks"
    assert it.handle.counters.messages == 0
    it = Patched(featured_model("gpt_oss"))
    attends_locally(it.attention(1))
    with pytest.raises(SequenceParallelismError, match="layer 1: 0"):
        packed_loss(it)


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
