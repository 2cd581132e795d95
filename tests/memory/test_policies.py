"""Checkpoint policies change what is recomputed and nothing else."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longctx_patch import LongContextConfig, SequenceShardCollator, patch
from longctx_patch.engine.call import CallShape
from longctx_patch.engine.traffic import CallTraffic, predicted_traffic
from longctx_patch.memory.policies import CheckpointPolicy
from longctx_patch.operator.decided import causal_call
from longctx_patch.plans.traffic import Traffic
from tests.harness import run_distributed
from tests.hf.tiny import tiny_model, token_rows
from tests.reference import relative_error

POLICIES: tuple[CheckpointPolicy, ...] = ("none", "full", "attention", "offload")
LAYERS = 2
LENGTH = 32


class Outcome(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    sent: Traffic
    kernel_calls: int
    predicted: CallTraffic


def one_step(config: LongContextConfig, *, lora: bool = False, fsdp: bool = False) -> Outcome:
    model: Any = tiny_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start, which would hide errors in lora_A
                torch.manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.1)
    handle = patch(model, config)
    if fsdp:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in handle.model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    collate = SequenceShardCollator(config, group_rank=handle.group_rank, pad_token_id=0)
    model.train()
    loss = model(**collate(token_rows(LENGTH))).loss
    loss.backward()
    grads = {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    shape = CallShape(2, 4, 2, 16, torch.float32, "cpu")
    return Outcome(
        loss.detach(),
        grads,
        Traffic(handle.counters.messages, handle.counters.bytes),
        handle.counters.kernel_calls,
        predicted_traffic(causal_call(handle.group, LENGTH, 1.0, shape)),
    )


def check_policies(rank: int, degrees: list[tuple[int, int]]) -> None:
    for ulysses, ring in degrees:
        outcomes = {
            policy: one_step(
                LongContextConfig(
                    ulysses_degree=ulysses,
                    ring_degree=ring,
                    ulysses_waves=2,
                    checkpoint=policy,
                )
            )
            for policy in POLICIES
        }
        for policy in ("full", "attention", "offload"):
            assert_bitwise(outcomes[policy], outcomes["none"])
        assert_counted(outcomes, ring)


def assert_bitwise(found: Outcome, wanted: Outcome) -> None:
    assert torch.equal(found.loss, wanted.loss)
    assert found.grads.keys() == wanted.grads.keys()
    assert all(torch.equal(found.grads[name], grad) for name, grad in wanted.grads.items())


def assert_counted(outcomes: dict[str, Outcome], ring: int) -> None:
    """`full` runs forward twice; `attention` runs it once, its recompute sends nothing."""
    predicted = outcomes["none"].predicted
    per_layer = {
        "none": predicted.forward + predicted.backward,
        "full": predicted.forward + predicted.forward + predicted.backward,
        "attention": predicted.forward + predicted.backward_after_replay,
        "offload": predicted.forward + predicted.backward_after_replay,
    }
    for policy, traffic in per_layer.items():
        sent = outcomes[policy].sent
        assert (sent.messages, sent.bytes) == (LAYERS * traffic.messages, LAYERS * traffic.bytes)
    # With a zigzag layout there are as many kernel calls in forward as in backward: one for each
    # step of the ring, and each part of the heads that Ulysses exchanges.
    calls = {policy: outcome.kernel_calls for policy, outcome in outcomes.items()}
    once = calls["none"] // 2
    assert once >= LAYERS * ring
    assert calls == {"none": 2 * once, "full": 3 * once, "attention": 2 * once, "offload": 2 * once}


def test_policies_are_bitwise_equal_and_counted() -> None:
    run_distributed(check_policies, 4, [(1, 4), (2, 2), (4, 1)])


def check_with_peft_and_fsdp(rank: int) -> None:
    config = {policy: LongContextConfig(ulysses_degree=2, checkpoint=policy) for policy in POLICIES}
    for lora, fsdp in ((True, False), (False, True), (True, True)):
        wanted = one_step(config["none"], lora=lora)
        average(wanted.grads)
        outcomes = {p: one_step(config[p], lora=lora, fsdp=fsdp) for p in POLICIES}
        assert_counted(outcomes, ring=1)
        for outcome in outcomes.values():
            if not fsdp:
                average(outcome.grads)
            assert outcome.grads.keys() == wanted.grads.keys()
            for name, grad in wanted.grads.items():
                assert relative_error(outcome.grads[name], grad) < 1e-5, (name, lora, fsdp)
        for policy in ("full", "attention", "offload"):
            assert_bitwise(outcomes[policy], outcomes["none"])


def average(grads: dict[str, Tensor]) -> None:
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def test_policies_with_peft_and_fsdp2() -> None:
    run_distributed(check_with_peft_and_fsdp, 2)


def test_two_forwards_before_backward_keep_their_own_frames() -> None:
    grads = {}
    for policy in POLICIES:
        model = tiny_model()
        handle = patch(model, LongContextConfig(checkpoint=policy))
        collate = SequenceShardCollator(handle.config, group_rank=0, pad_token_id=0)
        losses = [model(**collate(token_rows(12, seed=seed))).loss for seed in (1, 2)]
        torch.stack(losses).sum().backward()
        grads[policy] = [parameter.grad for parameter in model.parameters()]
    for policy in ("full", "attention", "offload"):
        pairs = zip(grads[policy], grads["none"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_backward_twice_over_one_graph() -> None:
    grads = {}
    for policy in POLICIES:
        model = tiny_model()
        handle = patch(model, LongContextConfig(checkpoint=policy, loss="logits"))
        collate = SequenceShardCollator(handle.config, group_rank=0, pad_token_id=0)
        loss = model(**collate(token_rows(12))).loss
        loss.backward(retain_graph=True)
        loss.backward()
        grads[policy] = [parameter.grad for parameter in model.parameters()]
    for policy in ("full", "attention", "offload"):
        pairs = zip(grads[policy], grads["none"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("policy", POLICIES)
def test_unpatch_restores_checkpointing(policy: CheckpointPolicy) -> None:
    model = tiny_model()
    model.gradient_checkpointing = False
    before = [dict(vars(layer)) for layer in model.get_decoder().layers]
    handle = patch(model, LongContextConfig(checkpoint=policy))
    assert model.get_decoder().layers[0].gradient_checkpointing == (policy != "none")
    handle.unpatch()
    assert [dict(vars(layer)) for layer in model.get_decoder().layers] == before
