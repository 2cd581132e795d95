"""The sentinel sees a sharded path that goes wrong, on whichever rank, and disturbs nothing."""

import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import Tensor

from longctx_patch import LongContextConfig, make_accelerator, patch
from longctx_patch.hf.sentinel import BOUNDS, TOKENS, DriftError, Sentinel
from tests.hf.tiny import featured_model, token_rows
from tests.plugin.launched import run_launched, sharding_on_cpus
from tests.plugin.sharded import bits, whole

LENGTH = 61


class Found(NamedTuple):
    errors: list[float]
    said: str
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


def watched() -> Found:
    """Two checks that are well, and one that is not, with steps of training in between."""
    config = LongContextConfig(ring_degree=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    with sharding_on_cpus():
        accelerator = make_accelerator(config, fsdp_plugin=plugin)
    lora = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])
    model: Any = get_peft_model(featured_model("llama"), lora)
    handle = patch(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
    layer = handle.model.model.layers[1].self_attn
    flaw = Flawed(layer)
    sentinel, replica = Sentinel(handle, model), dist.get_rank() // 2
    ids = torch.tensor(token_rows(LENGTH, 2)[replica]["input_ids"])
    found = Found([], "", untouched=True)
    for step in range(3):
        model.train()
        row = {"input_ids": ids[None], "labels": ids[None]}
        accelerator.backward(model(**row).loss)
        flaw.factor = 1.01 if step == 2 and dist.get_rank() == 3 else 1.0
        before = state_of(model)
        try:
            found.errors.append(sentinel.check(ids))
        except DriftError as error:
            found = found._replace(said=str(error))
        flaw.factor = 1.0
        found = found._replace(untouched=found.untouched and before == state_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_drift_ends_the_run() -> None:
    """A hundredth more of one layer's attention on the last of four ranks, two sharing a row each.
    The adapter has dropout in training, and none in what is compared."""
    by_rank = run_launched(watched, 4)
    for found in by_rank:
        assert found == by_rank[0]
        assert found.untouched
        assert len(found.errors) == 2
        assert max(found.errors) < BOUNDS[torch.float32] / 10
        assert re.search("on rank [23] from .*beyond the bound of 0.0001", found.said)
    assert TOKENS > LENGTH
