"""The sentinel sees a sharded path that goes wrong, on whichever rank, and disturbs nothing."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor

from longctx_patch import LongContextConfig, make_accelerator, patch
from longctx_patch.health.sentinel import BOUNDS, TOKENS, DriftError, Sentinel
from tests.hf.tiny import featured_model, token_rows
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.plugin.sharded import bits, whole

LENGTH = 61


class Found(NamedTuple):
    said: list[str]
    errors: list[float]
    untouched: bool


class Flawed:
    """A factor on one rank's attention output wherever the ranks share a row."""

    def __init__(self, layer: Any) -> None:
        self.factor = 1.0
        layer.register_forward_hook(self._after)

    def _after(self, _: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if output[0].shape[1] == LENGTH:  # the whole row: this rank alone
            return output
        return (output[0] * self.factor, *output[1:])


def state_of(model: Any) -> list[Any]:
    parameters = list(model.parameters())
    gradients = [bits(whole(p.grad)) for p in parameters if p.grad is not None]
    modes = [module.training for module in model.modules()]
    weights = [bits(whole(p)) for p in parameters]
    return [weights, gradients, modes, bits(torch.get_rng_state())]


def watched(sharded: bool, adapter: bool, family: str) -> Found:
    """Two checks that are well, two that are not, with steps of training in between."""
    config = LongContextConfig(ring_degree=2)
    given: dict[str, Any] = {}
    if sharded:
        from accelerate import FullyShardedDataParallelPlugin

        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    with sharding_on_cpus() if sharded else nullcontext():
        accelerator = make_accelerator(config, **given)
    model: Any = featured_model(family)
    if adapter:
        lora = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(model, lora)
    handle = patch(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
    layer = handle.model.model.layers[1].self_attn
    flaw = Flawed(layer)
    sentinel, replica = Sentinel(handle, model), dist.get_rank() // 2
    ids = torch.tensor(token_rows(LENGTH, 2)[replica]["input_ids"])
    found = Found([], [], untouched=True)
    for step in range(4):
        model.train()
        row = {"input_ids": ids[None], "labels": ids[None]}
        accelerator.backward(model(**row).loss)
        flaw.factor = 1.01 if step >= 2 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        before = state_of(model)
        try:
            drift = sentinel.check(ids)
            found.said.append(str(drift))
            found.errors.append(drift.error)
        except DriftError as error:
            found.said.append(str(error))
        flaw.factor = 1.0
        found = found._replace(untouched=found.untouched and before == state_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("ranks", "sharded", "adapter", "family"),
    [(2, False, False, "qwen3"), (4, True, True, "llama")],
)
def test_drift_is_said_and_then_ends_the_run(
    ranks: int, sharded: bool, adapter: bool, family: str
) -> None:
    """A hundredth more of one layer's attention on the last rank alone. The adapter has dropout in
    training, and none in what is compared."""
    by_rank = run_launched(watched, ranks, sharded, adapter, family)
    for found in by_rank:
        assert found == by_rank[0]
        assert found.untouched
        assert all(error < BOUNDS[torch.float32] / 10 for error in found.errors[:2])
        assert "within the bound of 0.0001" in found.said[0]
        assert f"on rank {ranks - 2}" in found.said[2] or f"on rank {ranks - 1}" in found.said[2]
        assert "beyond the bound" in found.said[2]
        assert "for the second time in a row" in found.said[3]
    assert TOKENS > LENGTH
