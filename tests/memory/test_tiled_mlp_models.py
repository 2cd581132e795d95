"""MLPs in tiles in patched models: every family, every policy, refusals, and the number of tiles,
which follows the memory."""

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from longctx_patch import LongContextConfig, patch
from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.family import EXPERTS, ROUTER
from longctx_patch.hf.layers.mlp_tiles import TiledForward, bind_mlps, tiles_of_layers
from longctx_patch.hf.model.transformers_api import decoder_layers, dense_mlps
from longctx_patch.memory.policies import CheckpointPolicy
from tests.hf.tiny import SUPPORTED, featured_model, gradients, precise_model, tiny_model
from tests.memory.trained import Flops, assert_equal, assert_near, tiled
from tests.reference import relative_error

POLICIES = get_args(CheckpointPolicy)


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


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with experts stay whole; the others are in tiles and don't recompute the last product.

    Those whose down projection has another name recompute it, since dropout may follow. Falcon-H1
    multiplies its result by a number, which is found out in the first tile of each backward.
    """
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
        inside = [getattr(layer, "mlp", layer).named_modules() for layer in decoder_layers(model)]
        has_experts = [any(n == "router" or "expert" in n for n, _ in names) for names in inside]
        whole = [
            experts
            or (hasattr(layer, "mixer") and layer.block_type != "mlp")
            or family == "zamba2"  # layers share their MLPs
            for experts, layer in zip(has_experts, decoder_layers(model), strict=True)
        ]
        assert tiles_of_layers(model) == tuple(1 if w else num_tiles for w in whole)
        mlps: list[Any] = dense_mlps(model)
        assert [mlp is None for mlp in mlps] == whole
        assert all(has_experts) <= bool({EXPERTS, ROUTER} & {*SUPPORTED[family].features})
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


def test_a_number_for_experts_is_refused() -> None:
    for family in ("mixtral", "qwen3_moe"):
        model = featured_model(family)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedModelError, match=r"mlp_tiles=4: all its layers have exp"):
            patch(model, LongContextConfig(mlp_tiles=4))
        for allowed in (None, 1):
            patch(model, LongContextConfig(mlp_tiles=allowed)).unpatch()
    mixed = featured_model("qwen2_moe", attn_implementation="sdpa")
    it = tiled(mixed, 4)
    it.step()
    assert it.handle.mlp_tiles == (1, 4, 1)


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
