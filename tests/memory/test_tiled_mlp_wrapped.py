"""MLPs in tiles in patched models that PEFT, FSDP2 or DDP has wrapped."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from longctx_patch.hf.model.transformers_api import dense_mlps
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.tiny import gradients, tiny_model
from tests.memory.trained import Gradients, Trained, adapter, assert_near, tiled


def adapted(num_tiles: int, *, before: bool, policy: CheckpointPolicy = "attention") -> Trained:
    model = tiny_model().double()  # adapters' gradients are small beside what rounds in them
    torch.manual_seed(1)
    if before:
        return tiled(get_peft_model(model, adapter()), num_tiles, checkpoint=policy)
    it = tiled(model, num_tiles, checkpoint=policy)
    it.model = get_peft_model(model, adapter())
    return it


@pytest.mark.parametrize("before", [True, False])
def test_adapters(before: bool) -> None:
    wanted = adapted(1, before=before).step()
    assert len(wanted) == 1 + 2 * 3 * 2
    for policy in ("none", "attention"):
        it = adapted(4, before=before, policy=policy)
        it.model.train()
        assert_near(it.step(), wanted)
        it.handle.unpatch()
        assert all("forward" not in vars(module) for module in it.model.modules())


def test_an_mlp_that_is_trained_beside_adapters() -> None:
    """PEFT trains a copy of the MLP; the copy is in tiles too, and `unpatch` finds it."""
    found = []
    for num_tiles in (1, 4):
        model = tiny_model()
        it = tiled(model, num_tiles)
        torch.manual_seed(1)
        options = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"])
        it.model = get_peft_model(model, options)
        found.append(it.step())
        assert it.handle.mlp_tiles == (num_tiles,) * 2
        it.handle.unpatch()
        assert all("forward" not in vars(module) for module in model.modules())
    assert_near(found[1], found[0])
    assert sum("mlp.modules_to_save" in name for name in found[0]) == 2 * 3


def sharded(num_tiles: int, rank: int, how: str, policy: CheckpointPolicy) -> Gradients:
    """The sums of gradients of two passes, under FSDP2 or DDP; ranks have different rows."""
    if how == "adapters":
        it = adapted(num_tiles, before=True, policy=policy)
    else:
        it = tiled(tiny_model(), num_tiles, checkpoint=policy)
    if num_tiles > 1:  # ranks may have different numbers of tiles
        num_tiles += rank
        for mlp in dense_mlps(it.handle.model):
            mlp.forward.asked = num_tiles  # type: ignore[union-attr]
    mesh = init_device_mesh("cpu", (2,))
    outer: Any = it.model
    if how == "ddp":
        outer = it.model = DistributedDataParallel(it.model)
    else:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if how == "bf16" else None)
        for layer in it.handle.model.get_decoder().layers:
            if how == "mlps":
                fully_shard(layer.mlp, mesh=mesh)
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(outer, mesh=mesh, mp_policy=precision)
    for number in (1, 2):
        context = outer.no_sync() if how == "ddp" and number == 1 else nullcontext()
        with context:
            loss = it.loss(seed=number + 2 * rank)
            loss.backward()
    assert it.handle.mlp_tiles == (num_tiles,) * 2
    grads = gradients(it.model)
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return {"loss": loss.detach(), **whole}


def check_on_two_ranks(rank: int) -> None:
    for how in ("layers", "mlps", "adapters", "ddp", "bf16"):
        wanted = sharded(1, rank, how, "none")
        for policy in ("none", "attention"):
            assert_near(sharded(3, rank, how, policy), wanted, 0.02 if how == "bf16" else 1e-6)
    it = tiled(tiny_model(), 4, ulysses_degree=2, checkpoint="attention")
    assert_near(it.step(), tiled(tiny_model(), 1, ulysses_degree=2).step())
    mesh = init_device_mesh("cpu", (2,))
    for given, module in ((4, it), (None, tiled(tiny_model(), None))):
        fully_shard(module.handle.model.get_decoder().layers[0].mlp.gate_proj, mesh=mesh)
        if given is None:
            module.step()
            assert module.handle.mlp_tiles == (1, 1)
            continue
        with pytest.raises(ValueError, match=r"mlp_tiles=4: FSDP2 is around 'gate_proj'.*as a wh"):
            module.step()


def test_on_two_ranks() -> None:
    run_distributed(check_on_two_ranks, 2)
