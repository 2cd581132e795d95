"""Each policy keeps what its name says, and none changes a number."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import pytest
import torch
from peft import get_peft_model
from torch import Tensor

from longctx_patch.memory.policies import (
    POLICIES,
    CheckpointPolicy,
    LayerPolicy,
    describe_layers,
)
from tests.harness import run_distributed
from tests.hf.tiny import tiny_model
from tests.memory.live_bytes import LiveBytes
from tests.memory.trained import (
    FORWARDS,
    Gradients,
    Trained,
    adapter,
    assert_equal,
    assert_near,
    averaged,
    counted_step,
)

LAYERS, BATCH, LENGTH, HIDDEN, HEADS, KV_HEADS, DIM = 2, 2, 32, 64, 4, 2, 16
INPUT = 4 * BATCH * LENGTH * HIDDEN
RESULTS = 4 * BATCH * LENGTH * HEADS * (DIM + 1)
"""Bytes in float32 of a layer's input, and of attention's output and lse."""


class Means(NamedTuple):
    """Bytes that a policy keeps, written down here and not read from its record."""

    kept: int
    """Bytes of a layer that stay on the device until backward; for `none` a lower bound."""
    on_host: int
    """Bytes of a layer in host memory."""


MEANS: dict[LayerPolicy, Means] = {
    "none": Means(4 * (INPUT + RESULTS), 0),
    "full": Means(INPUT, 0),
    "attention": Means(INPUT + RESULTS, 0),
    "offload": Means(0, INPUT + RESULTS),
}


def kept_bytes(policy: LayerPolicy) -> int:
    """Bytes that one more layer keeps on the device between forward and backward; host buffers
    exist since the first step."""
    live = []
    for num_layers in (3, 4):
        model = tiny_model(num_hidden_layers=num_layers)
        with LiveBytes() as meter:
            it = Trained(model, length=LENGTH, checkpoint=policy)
            it.step()
            rest = meter.allocated()
            loss = it.loss()
            live.append(meter.allocated() - rest)
            del loss
    return live[1] - live[0]


@pytest.mark.parametrize("policy", MEANS)
def test_a_name_leads_to_the_bytes_that_it_says(policy: LayerPolicy) -> None:
    it = Trained(tiny_model(), length=LENGTH, checkpoint=policy)
    it.step()
    assert it.handle.checkpointing.host_bytes == LAYERS * MEANS[policy].on_host
    kept = kept_bytes(policy)
    assert kept == MEANS[policy].kept if policy != "none" else kept >= MEANS[policy].kept


def test_auto_leads_to_the_rungs_that_it_names() -> None:
    """There is memory for all layers, then for none; then no meter counts it."""
    for capacity, layers in ((10**12, ("none", "none")), (0, ("attention", "attention"))):
        with LiveBytes(capacity) as meter:
            it = Trained(tiny_model(), meter=meter)
            for _ in range(3):
                it.step()
        assert it.handle.checkpointing.policies == layers
    it = Trained(tiny_model(), checkpoint="auto")
    it.step()
    assert it.handle.checkpointing.policies == ("attention", "attention")
    assert POLICIES["auto"].rungs == ("offload", "attention", "none")


def test_every_name_has_a_record_and_every_layer_policy_is_its_only_rung() -> None:
    assert tuple(POLICIES) == get_args(CheckpointPolicy)
    assert all(policy.name == name for name, policy in POLICIES.items())
    alone = [policy.name for policy in POLICIES.values() if policy.rungs == (policy.name,)]
    assert tuple(alone) == get_args(LayerPolicy)


def test_layers_are_described_in_words() -> None:
    assert describe_layers(("attention",) * 22 + ("none",) * 10) == (
        "22 of 32 layers recompute all but attention, 10 recompute nothing"
    )
    assert describe_layers(("offload", "full")) == (
        "1 of 2 layers recompute all but attention from host memory, 1 recompute everything"
    )
    it = Trained(tiny_model(), checkpoint="full")
    assert str(it.handle.checkpointing) == "2 of 2 layers recompute everything"


def check_degrees(rank: int) -> None:
    """Results are equal to the bit, messages to the byte; kernels run as often as policies say."""
    first: list[LayerPolicy] = ["none", "full", "none", "offload"]
    second: list[LayerPolicy] = ["none", "full", "attention", "full"]
    for u, r in ((1, 4), (2, 2)):
        degrees: dict[str, Any] = {"ulysses_degree": u, "ring_degree": r}
        alone = [Trained(tiny_model(), length=LENGTH, checkpoint=name, **degrees) for name in MEANS]
        mixes = zip(first, second, strict=True)
        mixed = [Trained(tiny_model(), length=LENGTH, forced=mix, **degrees) for mix in mixes]
        wanted: Gradients = {}
        calls: dict[int, set[int]] = defaultdict(set)
        for it in (*alone, *mixed):
            found = counted_step(it)
            assert_equal(found, wanted := wanted or found)
            runs = sum(FORWARDS[policy] + 1 for policy in it.handle.checkpointing.policies)
            calls[runs].add(it.handle.counters.kernel_calls)
            it.loss()  # compares the first backward's traffic with the plans
        # In a zigzag layout backward has as many kernel calls as forward.
        once = min(calls[2 * LAYERS]) // (2 * LAYERS)
        assert once >= r
        assert calls == {runs: {runs * once} for runs in calls}


def test_over_four_ranks() -> None:
    run_distributed(check_degrees, 4)


def check_wrapped(rank: int) -> None:
    """Each policy gives the same results under adapters, FSDP2 or both."""
    for lora, fsdp in ((True, False), (False, True), (True, True)):
        plain: Gradients = {}
        wanted: Gradients = {}
        for policy in MEANS:
            model: Any = tiny_model()
            if lora:
                torch.manual_seed(1)
                model = get_peft_model(model, adapter())
            it = Trained(model, length=LENGTH, ulysses_degree=2, checkpoint=policy)
            if not plain:
                plain = {name: averaged(grad) for name, grad in it.step().items()}
            if fsdp:
                it.shard()
            found = {name: averaged(grad) for name, grad in counted_step(it).items()}
            assert_equal(found, wanted := wanted or found)
            assert_near(found, plain, 1e-5)


def test_with_adapters_and_under_fsdp2() -> None:
    run_distributed(check_wrapped, 2)


def two_losses(it: Trained) -> None:
    (it.loss(12, seed=1) + it.loss(12, seed=2)).backward()


def two_backwards(it: Trained) -> None:
    loss = it.loss(12)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("backward", [two_losses, two_backwards])
def test_each_pass_keeps_a_frame_of_its_own(backward: Callable[[Trained], None]) -> None:
    grads: list[list[Tensor | None]] = []
    for policy in MEANS:
        it = Trained(tiny_model(), checkpoint=policy, loss="logits")
        backward(it)
        grads.append([parameter.grad for parameter in it.model.parameters()])
    for found in grads[1:]:
        assert all(map(torch.equal, found, grads[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_unpatch_restores_checkpointing(policy: CheckpointPolicy) -> None:
    model = tiny_model()
    model.gradient_checkpointing = False
    before = [dict(vars(layer)) for layer in model.get_decoder().layers]
    it = Trained(model, checkpoint=policy)
    assert model.get_decoder().layers[0].gradient_checkpointing == (policy != "none")
    it.step()
    it.handle.unpatch()
    assert [dict(vars(layer)) for layer in model.get_decoder().layers] == before
