"""MLPs in tiles in patched models: every kind and policy, wrapped or compiled by others, refusals,
and the number of tiles, which follows the memory."""

import copy
import inspect
from contextlib import nullcontext
from types import MethodType
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import liger

from longctx_patch import LongContextConfig, patch
from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.hf.layers import fused_layers
from longctx_patch.hf.layers.fused_layers import fuse_layers
from longctx_patch.hf.layers.mlp_tiles import TiledForward, bind_mlps, tiles_of_layers
from longctx_patch.hf.model.transformers_api import decoder_layers, dense_mlps
from longctx_patch.kernels.installed import Package
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, gradients, precise_model, tiny_model
from tests.memory.trained import (
    Flops,
    Gradients,
    Trained,
    adapter,
    assert_equal,
    assert_near,
    tiled,
)
from tests.reference import relative_error

POLICIES = get_args(CheckpointPolicy)
FAMILIES = (
    *("llama", "qwen2_moe", "gemma3n_text", "phi3", "starcoder2", "seed_oss", "apertus", "bitnet"),
    *("nemotron", "gpt_neox", "phi", "beam", "llama4_text", "falcon_h1", "lfm2", "zamba2"),
)
"""One for each code that an MLP has in some family, with and without experts in other layers;
tests/memory/test_checkpointing.py finds a family with another code."""


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: CheckpointPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every policy a tile runs twice: in forward and in its own backward."""
    wanted, lengths = tiled(tiny_model(), 1).step(), []
    model = tiny_model()
    kind: Any = type(model.get_decoder().layers[0].mlp)
    stock = kind.forward

    def counted(mlp: Any, hidden: Tensor) -> Tensor:
        lengths.append(hidden.shape[1])
        return stock(mlp, hidden)

    monkeypatch.setattr(kind, "forward", counted)
    for num_tiles in (3, 7, 40):
        lengths.clear()
        it = tiled(model, num_tiles, checkpoint=policy)
        assert_near(it.step(), wanted)
        assert it.handle.mlp_tiles == (min(num_tiles, 31),) * 2
        assert (len(lengths), sum(lengths)) == (4 * min(num_tiles, 31), 4 * 31)
        it.handle.unpatch()


@pytest.mark.parametrize("policy", POLICIES)
def test_two_forwards_before_one_backward_and_two_backwards_after_one_forward(
    policy: CheckpointPolicy,
) -> None:
    found = []
    for num_tiles in (1, 4):
        it = tiled(tiny_model(), num_tiles, checkpoint=policy, loss="logits")
        loss = it.loss(seed=1) + it.loss(19, seed=2)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(it.model)})
    assert_near(found[1], found[0])


def codes_of_mlps(model: Any) -> set[str]:
    """Checks which layers have an MLP that can run in tiles; gives the code of those."""
    mlps, layers = dense_mlps(model), decoder_layers(model)
    inside = [getattr(layer, "mlp", layer).named_modules() for layer in layers]
    has_experts = [any(n == "router" or "expert" in n for n, _ in names) for names in inside]
    assert [mlp is None for mlp in mlps] == [
        experts
        or (hasattr(layer, "mixer") and layer.block_type != "mlp")
        or model.config.model_type == "zamba2"  # layers share their MLPs
        for experts, layer in zip(has_experts, layers, strict=True)
    ]
    return {inspect.getsource(type(mlp).forward) for mlp in mlps if mlp is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_mlp(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in tiles don't recompute the last product, unless their down projection has another
    name, since dropout may follow. Falcon-H1 multiplies its result by a number, which is found out
    in the first tile of each backward."""
    found, flops, spared = [], [], 0
    for num_tiles, leaves_out in ((1, False), (3, True), (3, False)):
        model = precise_model(family)
        undo = bind_mlps(model, num_tiles)
        ids = torch.arange(2 * 19).view(2, 19)
        with monkeypatch.context() as patched, Flops() as counted:
            if not leaves_out:
                patched.setattr(TiledForward, "_last_layer", lambda _: None)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        flops.append(counted.total)
        found.append({"loss": loss.detach(), **gradients(model)})
        mlps: list[Any] = dense_mlps(model)
        assert tiles_of_layers(model) == tuple(1 if mlp is None else num_tiles for mlp in mlps)
        scaled = [mlp for mlp in mlps if hasattr(mlp, "down_multiplier")]
        last = [mlp.down_proj for mlp in mlps if hasattr(mlp, "down_proj") and mlp not in scaled]
        tried = [linear for mlp in scaled for linear in (mlp.gate_proj, mlp.up_proj)]
        spared = sum(2 * ids.numel() * linear.weight.numel() for linear in last)
        spared -= sum(2 * ids[:, : 19 // 3].numel() * linear.weight.numel() for linear in tried)
        undo()
        assert all("forward" not in vars(module) for module in model.modules())
    assert_near(found[1], found[0])
    assert_equal(found[1], found[2])
    assert flops[2] - flops[1] == spared


HOWS = ("adapters", "adapters later", "a trained copy", "liger", "liger later", "some experts")


def changed_model(how: str, num_tiles: int, policy: CheckpointPolicy = "attention") -> Trained:
    """A patched model that PEFT or Liger Kernel has changed before, or changes later."""
    if how == "some experts":
        return tiled(featured_model("qwen2_moe", attn_implementation="sdpa"), num_tiles)
    model: Any = tiny_model().double()  # adapters' gradients are small beside what rounds in them
    torch.manual_seed(1)
    if how == "adapters":
        return tiled(get_peft_model(model, adapter()), num_tiles, checkpoint=policy)
    if how == "liger":
        fuse_layers(model, "liger")
    it = tiled(model, num_tiles, checkpoint=policy)
    torch.manual_seed(1)
    if how == "adapters later":
        it.model = get_peft_model(model, adapter())
    elif how == "a trained copy":
        options = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"])
        it.model = get_peft_model(model, options)
    elif how == "liger later":
        fuse_layers(model, "liger")
    return it


def doubled(mlp: Any, hidden: Tensor) -> Tensor:
    """Stands in for a forward of Liger Kernel's."""
    return 2 * type(mlp).forward(mlp, hidden)


@pytest.mark.parametrize("how", HOWS)
def test_mlps_that_others_have_changed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that PEFT trains is in tiles too, and `unpatch` finds it; Liger's forward stays."""

    def apply(model: Any, options: dict[str, Any]) -> None:
        for mlp in filter(None, dense_mlps(model)):
            assert "forward" not in vars(mlp)
            mlp.forward = MethodType(doubled, mlp)

    monkeypatch.setattr(liger, "apply_liger_kernel", apply)
    monkeypatch.setattr(Package, "problem", lambda package: None)
    monkeypatch.setattr(fused_layers, "runs_triton", lambda: True)
    wanted = changed_model(how, 1).step()
    assert len(wanted) == {"adapters": 13, "adapters later": 13}.get(how, len(wanted))
    assert sum("mlp.modules_to_save" in n for n in wanted) == (6 if how == "a trained copy" else 0)
    policies: tuple[CheckpointPolicy, ...] = ("none", "attention")
    for policy in policies:
        it = changed_model(how, 4, policy)
        it.model.train()
        assert_near(it.step(), wanted)
        assert it.handle.mlp_tiles == ((1, 4, 1) if how == "some experts" else (4, 4))
        it.handle.unpatch()
        own = [vars(m)["forward"] for m in it.model.modules() if "forward" in vars(m)]
        assert all(each.__func__ is doubled for each in own)
        assert bool(own) == how.startswith("liger")


def test_a_number_for_experts_is_refused() -> None:
    for family in ("mixtral", "qwen3_moe"):
        model = featured_model(family)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedModelError, match=r"mlp_tiles=4: all its layers have exp"):
            patch(model, LongContextConfig(mlp_tiles=4))
        for allowed in (None, 1):
            patch(model, LongContextConfig(mlp_tiles=allowed)).unpatch()


def test_weights_that_are_no_parameters_are_refused() -> None:
    """FSDP1 makes such weights: they are views of its flat parameter."""
    for num_tiles in (4, None):
        model = tiny_model()
        undo = bind_mlps(model, num_tiles, lambda _: 1600)
        linear = model.get_decoder().layers[1].mlp.up_proj
        flat = nn.Parameter(linear.weight.detach().flatten())
        del linear.weight
        linear.weight = flat.view(96, 64)
        ids = torch.arange(31)[None]
        if num_tiles is None:
            model(input_ids=ids, labels=ids).loss.backward()
            assert flat.grad is not None
            assert tiles_of_layers(model) == (31, 1)
            continue
        with pytest.raises(
            ValueError, match=r"=4: 'up_proj.weight' of .*Use FSDP2 or DDP, or mlp_"
        ):
            model(input_ids=ids)
        undo()


def test_whole_rows_generation_and_evaluation() -> None:
    plain, it = tiled(tiny_model(), 1), tiled(tiny_model(), 4)
    ids = torch.arange(2 * 31).view(2, 31)
    found = []
    for each in (plain, it):
        each.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({"loss": torch.zeros(()), **gradients(each.model)})
        each.model.eval()
    assert_near(found[1], found[0])
    with torch.no_grad():
        assert relative_error(it.loss(), plain.loss()) < 1e-6
        assert it.handle.mlp_tiles == (4, 4)
        words = [each.model.generate(ids[:1, :9], max_new_tokens=5) for each in (plain, it)]
    assert torch.equal(*words)
    assert it.handle.mlp_tiles == (1, 1)  # decoding has one token


def test_the_number_follows_the_memory() -> None:
    model = tiny_model()
    per_token = 3 * 96 * 4  # bytes in float32
    undo = bind_mlps(model, None, lambda _: 16 * 10 * per_token)
    for length, wanted in ((5, 1), (6, 2), (31, 7)):  # two rows of this length
        ids = torch.zeros(2, length, dtype=torch.long)
        model(input_ids=ids)
        assert tiles_of_layers(model) == (wanted, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert tiles_of_layers(model) == (4, 4)
    undo()
    it = tiled(model, None)
    it.step()
    assert it.handle.mlp_tiles == (1, 1), "no memory is counted on CPU"


def test_unpatch_restores_the_mlps() -> None:
    model = tiny_model()
    mlps = [layer.mlp for layer in decoder_layers(model)]
    before = [dict(vars(mlp)) for mlp in mlps]
    names = list(model.state_dict())
    it = tiled(model, 4)
    it.step()
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(mlps[0])
    assert copied.forward.module is copied
    it.handle.unpatch()
    assert [dict(vars(mlp)) for mlp in mlps] == before
    patch(model, LongContextConfig(mlp_tiles=1))
    assert [dict(vars(mlp)) for mlp in mlps] == before


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(("patched_first", "layers"), [(True, 9), (False, 2)])
def test_compiled_mlps(patched_first: bool, layers: int) -> None:
    """All layers, more than torch compiles one function for, share four graphs of a tile: with and
    without gradients, for one length and for any."""
    wanted = [
        tiled(tiny_model(num_hidden_layers=layers), 1).step(length) for length in (31, 37, 41)
    ]
    model = tiny_model(num_hidden_layers=layers)

    def compile_mlps() -> None:
        for mlp in dense_mlps(model):
            mlp.compile()  # type: ignore[union-attr]

    if not patched_first:
        compile_mlps()
    it = tiled(model, 4, checkpoint="attention")
    if patched_first:
        compile_mlps()
    for length, step in zip((31, 37, 41), wanted, strict=True):
        assert_near(it.step(length), step, 1e-5)
    assert it.handle.mlp_tiles == (4,) * layers
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 4
    it.step(29)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["unimplemented"], "a limit on recompiling was not met"
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.mark.usefixtures("aot_eager")
def test_dropout_is_not_compiled() -> None:
    """MLPs with dropout run uncompiled: compiled code might draw other numbers in backward."""
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(tiny_model(), adapter(lora_dropout=0.4))
        it = tiled(model.train(), 4, checkpoint="attention")
        if is_compiled:
            for mlp in dense_mlps(it.handle.model):
                mlp.compile()  # type: ignore[union-attr]
        torch.manual_seed(3)
        found.append(it.step())
    assert_near(found[1], found[0])
    assert not counters["stats"]["unique_graphs"]


def sharded(num_tiles: int, rank: int, how: str, policy: CheckpointPolicy) -> Gradients:
    """The sums of gradients of two passes, under FSDP2 or DDP; ranks have different rows."""
    if how == "adapters":
        it = changed_model("adapters", num_tiles, policy)
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
