"""MLPs in tiles: the numbers of the whole MLP in less memory, alone and in patched models."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
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

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from longctx_patch.config import CheckpointPolicy
from longctx_patch.hf import FAMILIES, UnsupportedModelError, fused_layers
from longctx_patch.hf.fused_layers import fuse_layers
from longctx_patch.hf.mlp_tiles import bind_mlps, tiles_of_layers
from longctx_patch.hf.table import ROUTER
from longctx_patch.hf.transformers_api import decoder_layers, dense_mlps
from longctx_patch.kernels.machine import Package
from longctx_patch.memory import run_tiled, tiles_that_fit
from tests.harness import run_distributed
from tests.hf.tiny import featured_model, gradients, tiny_model, token_rows
from tests.memory.live_bytes import LiveBytes
from tests.reference import relative_error

POLICIES = get_args(CheckpointPolicy)
SIZE, INTERMEDIATE = 16, 48
Gradients = dict[str, Tensor]


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, INTERMEDIATE)
        self.up = nn.Linear(SIZE, INTERMEDIATE, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(INTERMEDIATE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Mlp:
    torch.manual_seed(0)
    return Mlp(**options).to(dtype)


def made_input(
    length: int, *, rows: int = 2, dtype: torch.dtype = torch.float32, needs_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient of what the MLP makes of them."""
    torch.manual_seed(1)
    hidden = torch.randn(rows, length, SIZE, dtype=torch.float64)
    grad = torch.randn(rows, length, SIZE, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(needs_grad), grad.to(dtype)


def passed(
    mlp: nn.Module, hidden: Tensor, grad: Tensor, run: Callable[[Tensor], Tensor]
) -> Gradients:
    """Outputs and all gradients of a pass."""
    mlp.zero_grad()
    hidden.grad = None
    out = run(hidden)
    out.backward(grad.to(out.dtype))
    found = {"out": out.detach(), **gradients(mlp)}
    return found if hidden.grad is None else found | {"hidden": hidden.grad}


def in_tiles(mlp: nn.Module, num_tiles: int) -> Callable[[Tensor], Tensor]:
    return lambda hidden: run_tiled(mlp.forward, mlp, hidden, num_tiles)


def assert_near(found: Gradients, wanted: Gradients, bound: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    assert len(found) > 1
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name], tensor) < bound, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("length", [1, 7, 31])
def test_outputs_and_gradients_are_those_of_the_whole_mlp(
    length: int, dtype: torch.dtype, bound: float
) -> None:
    mlp = made(dtype)
    hidden, grad = made_input(length, dtype=dtype)
    wanted = passed(mlp, hidden, grad, mlp)
    assert set(wanted) == {"out", "hidden", *dict(mlp.named_parameters())}
    for num_tiles in (2, 3, 7, 40):
        assert_near(passed(mlp, hidden, grad, in_tiles(mlp, num_tiles)), wanted, bound)
    for name, tensor in passed(mlp, hidden, grad, in_tiles(mlp, 1)).items():
        assert torch.equal(tensor, wanted[name])


def test_every_token_is_in_one_tile_and_tiles_are_of_equal_size() -> None:
    for length, num_tiles in ((31, 4), (7, 7), (8, 3), (5, 40)):
        mlp, sizes = made(), []
        mlp.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(args[0].shape[1]))
        hidden, _ = made_input(length, needs_grad=False)
        run_tiled(mlp, mlp, hidden, num_tiles)
        assert len(sizes) == min(num_tiles, length)
        assert sum(sizes) == length
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("trained", [["gate.bias"], ["up.weight", "down.weight"], []])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_only_what_is_trained_gets_gradients(trained: list[str], needs_grad: bool) -> None:
    mlp = made()
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name in trained)
    hidden, grad = made_input(31, needs_grad=needs_grad)
    if not trained and not needs_grad:
        assert not in_tiles(mlp, 3)(hidden).requires_grad
        return
    found = passed(mlp, hidden, grad, in_tiles(mlp, 3))
    assert set(found) == {"out", *trained, *(["hidden"] if needs_grad else [])}
    assert_near(found, passed(mlp, hidden, grad, mlp))


def test_a_parameter_in_two_places_and_one_without_use() -> None:
    mlp = made()
    mlp.up.weight = mlp.gate.weight
    mlp.unused = nn.Parameter(torch.zeros(3))
    hidden, grad = made_input(31)
    wanted = passed(mlp, hidden, grad, mlp)
    assert_near(passed(mlp, hidden, grad, in_tiles(mlp, 4)), wanted)
    assert mlp.unused.grad is None
    assert mlp.up.weight is mlp.gate.weight


def test_gradients_of_a_part() -> None:
    """As torch.autograd.grad asks for them."""
    mlp = made()
    hidden, grad = made_input(31)
    for wanted in ([mlp.down.weight], [hidden], [mlp.gate.bias, hidden]):
        whole = torch.autograd.grad(mlp(hidden), wanted, grad)
        tiled = torch.autograd.grad(in_tiles(mlp, 4)(hidden), wanted, grad)
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(tiled, whole, strict=True))


def test_each_hook_runs_once_in_a_backward_pass() -> None:
    mlp = made()
    hidden, grad = made_input(31)
    calls: list[str] = []
    for name, parameter in mlp.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(f"of {name}"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    passed(mlp, hidden, grad, in_tiles(mlp, 5))
    names = dict(mlp.named_parameters())
    assert sorted(calls) == sorted([*names, *(f"of {name}" for name in names)])


@pytest.mark.parametrize("when", ["no_grad", "eval without gradients", "training"])
def test_memory_is_that_of_one_tile(when: str) -> None:
    length, mlp = 512, made()
    hidden, grad = made_input(length, rows=1)
    of_parameters = sum(parameter.nbytes for parameter in mlp.parameters())
    peaks = []
    for num_tiles in (1, 4, 32):
        with LiveBytes() as meter, torch.set_grad_enabled(when == "training"):
            out = in_tiles(mlp.train(when == "training"), num_tiles)(hidden)
            kept = meter.allocated()
            if when == "training":
                out.backward(grad)
                mlp.zero_grad()
            else:
                assert not out.requires_grad
            peaks.append(meter.peak())
        if num_tiles > 1:
            assert kept <= 2 * hidden.nbytes + of_parameters  # input and output
    intermediates = 3 * INTERMEDIATE * length * 4
    assert peaks[0] > (intermediates if when == "training" else 2 / 3 * intermediates)
    rest = 3 * hidden.nbytes + 6 * of_parameters
    assert peaks[2] < rest + 4 * intermediates / 32
    assert all(fewer > more for fewer, more in pairwise(peaks))


def test_dropout_is_drawn_again_in_backward() -> None:
    mlp = made(dropout=0.5)
    hidden, grad = made_input(31)

    def in_pieces(hidden: Tensor) -> Tensor:
        """The same tiles, and nothing computed twice."""
        cuts = [number * 31 // 4 for number in range(5)]
        return torch.cat([mlp(hidden[:, a:b]) for a, b in pairwise(cuts)], 1)

    def then_drawn(run: Callable[[Tensor], Tensor]) -> tuple[Gradients, Tensor]:
        """A pass, and numbers that are drawn before and after its backward."""
        drawn: list[Tensor] = []

        def run_and_draw(hidden: Tensor) -> Tensor:
            out = run(hidden)
            drawn.append(torch.rand(3))
            return out

        torch.manual_seed(7)
        found = passed(mlp, hidden, grad, run_and_draw)
        return found, torch.cat([*drawn, torch.rand(3)])

    (wanted, drawn), (found, then) = (then_drawn(run) for run in (in_pieces, in_tiles(mlp, 4)))
    assert_near(found, wanted)
    assert torch.equal(then, drawn), "backward moved the random numbers of others"


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_backward_runs_under_the_autocast_of_forward(where: str) -> None:
    mlp, dtypes = made(), []
    mlp.gate.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    hidden, grad = made_input(31)
    found = []
    for num_tiles in (1, 4):
        mlp.zero_grad()
        hidden.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = in_tiles(mlp, num_tiles)(hidden)
            assert out.dtype == torch.bfloat16
            if where == "inside":
                out.backward(grad.bfloat16())
        if where == "outside":
            out.backward(grad.bfloat16())
        found.append({"out": out.detach(), "hidden": hidden.grad, **gradients(mlp)})
    assert_near(found[1], found[0], 0.01)
    assert dtypes == [torch.bfloat16] * (1 + 2 * 4)


def test_autocast_does_not_remember_weights_without_gradients() -> None:
    """Those that forward has cast, for an MLP that runs whole in the same context."""
    mlp = made()
    hidden, grad = made_input(31)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_tiles(mlp, 4)(hidden)
        mlp(hidden).backward(grad.bfloat16())
    assert len(gradients(mlp)) == len(list(mlp.parameters()))


@pytest.mark.parametrize("num_tiles", [2, 7, 64])
def test_bfloat16_is_as_accurate_as_the_whole_mlp(num_tiles: int) -> None:
    exact = made(torch.bfloat16).double()
    hidden, grad = made_input(256, dtype=torch.bfloat16)
    wide = hidden.detach().double().requires_grad_()
    wanted = passed(exact, wide, grad.double(), exact)
    mlp = made(torch.bfloat16)
    whole = passed(mlp, hidden, grad, mlp)
    tiled = passed(mlp, hidden, grad, in_tiles(mlp, num_tiles))
    for name, tensor in wanted.items():
        assert tiled[name].dtype == torch.bfloat16
        error, bound = (relative_error(each[name], tensor) for each in (tiled, whole))
        assert error <= 2 * bound, name


def test_what_would_be_lost_is_refused() -> None:
    mlp, scale = made(), nn.Parameter(torch.ones(()))
    hidden, grad = made_input(31)
    with pytest.raises(RuntimeError, match=r"a trained tensor \[\] that is not.*mlp_tiles=1"):
        run_tiled(lambda x: mlp(x * scale), mlp, hidden, 4).backward(grad)
    out = in_tiles(mlp, 4)(hidden)
    with torch.no_grad():
        mlp.up.weight += 1
    with pytest.raises(RuntimeError, match=r"changed in place between.*before optimizer.step"):
        out.backward(grad)
    out = in_tiles(mlp, 4)(hidden)
    out.backward(grad)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(grad)


def test_as_few_tiles_as_fit() -> None:
    assert tiles_that_fit(10**12, None) == 1
    for device_bytes in (16000, 2**37):
        share = device_bytes // 16
        assert [tiles_that_fit(n, device_bytes) for n in (0, share, share + 1)] == [1, 1, 2]
        assert tiles_that_fit(10 * share, device_bytes) == 10


class Trained:
    """A patched model and its batches."""

    def __init__(self, model: Any, num_tiles: int | None, **config: Any) -> None:
        self.model = model
        self.handle: PatchHandle = patch(model, LongContextConfig(mlp_tiles=num_tiles, **config))
        self.collate = SequenceShardCollator(
            self.handle.config, group_rank=self.handle.group_rank, pad_token_id=0
        )

    def loss(self, length: int = 31, *, seed: int = 0) -> Tensor:
        return self.model(**self.collate(token_rows(length, seed=seed)), use_cache=False).loss

    def step(self, length: int = 31, *, seed: int = 0) -> Gradients:
        loss = self.loss(length, seed=seed)
        loss.backward()
        grads = gradients(self.model)
        self.model.zero_grad()
        return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: CheckpointPolicy) -> None:
    wanted = Trained(tiny_model(), 1).step()
    for num_tiles in (3, 7, 40):
        it = Trained(tiny_model(), num_tiles, checkpoint=policy)
        assert_near(it.step(), wanted)
        assert it.handle.mlp_tiles == (min(num_tiles, 31),) * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_two_forwards_before_one_backward_and_two_backwards_after_one_forward(
    policy: CheckpointPolicy,
) -> None:
    found = []
    for num_tiles in (1, 4):
        it = Trained(tiny_model(), num_tiles, checkpoint=policy, loss="logits")
        loss = it.loss(seed=1) + it.loss(19, seed=2)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(it.model)})
    assert_near(found[1], found[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recompute_leaves_the_tiles_out(
    policy: CheckpointPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs in forward and in its own backward, whatever else the layer computes again."""
    model, lengths = tiny_model(), []
    kind: Any = type(model.get_decoder().layers[0].mlp)
    stock = kind.forward

    def counted(mlp: Any, hidden: Tensor) -> Tensor:
        lengths.append(hidden.shape[1])
        return stock(mlp, hidden)

    monkeypatch.setattr(kind, "forward", counted)
    Trained(model, 5, checkpoint=policy).step(30)
    assert lengths == [6] * (5 * 2 * 2)


def test_the_peak_of_a_model_falls() -> None:
    peaks = []
    for num_tiles in (1, 8):
        model = tiny_model(num_hidden_layers=3, intermediate_size=2048)
        it = Trained(model, num_tiles, checkpoint="attention")
        with LiveBytes() as meter:
            it.step(256)
            peaks.append(meter.peak() - meter.allocated())
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    """Layers with experts stay whole, and the others are in tiles."""
    found = []
    for num_tiles in (1, 3):
        model = featured_model(family)
        undo = bind_mlps(model, num_tiles)
        ids = torch.arange(2 * 19).view(2, 19)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found.append({"loss": out.loss.detach(), **gradients(model)})
        has_experts = [any("expert" in n for n, _ in m.named_modules()) for m in model.model.layers]
        assert tiles_of_layers(model) == tuple(1 if e else num_tiles for e in has_experts)
        assert [mlp is None for mlp in dense_mlps(model)] == has_experts
        assert all(has_experts) <= (ROUTER in FAMILIES[family].features)
        undo()
        assert all("forward" not in vars(module) for module in model.modules())
    assert_near(found[1], found[0])


def test_a_number_for_experts_is_refused() -> None:
    for family in ("mixtral", "qwen3_moe"):
        model = featured_model(family)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedModelError, match=r"mlp_tiles=4: all its layers have exp"):
            patch(model, LongContextConfig(mlp_tiles=4))
        for allowed in (None, 1):
            patch(model, LongContextConfig(mlp_tiles=allowed)).unpatch()
    mixed = featured_model("qwen2_moe", attn_implementation="sdpa")
    it = Trained(mixed, 4)
    it.step()
    assert it.handle.mlp_tiles == (1, 4, 1)


def test_weights_that_are_no_parameters_are_refused() -> None:
    """As FSDP1 makes them, of its flat parameter."""
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
    plain, it = Trained(tiny_model(), 1), Trained(tiny_model(), 4)
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
    assert it.handle.mlp_tiles == (1, 1)  # of one token


def adapter(**options: Any) -> LoraConfig:
    targets = ["q_proj", "gate_proj", "down_proj"]
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)


def adapted(num_tiles: int, *, before: bool, policy: CheckpointPolicy = "attention") -> Trained:
    model = tiny_model()
    torch.manual_seed(1)
    if before:
        return Trained(get_peft_model(model, adapter()), num_tiles, checkpoint=policy)
    it = Trained(model, num_tiles, checkpoint=policy)
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
    """PEFT trains a copy of it; the copy is in tiles too, and `unpatch` finds it."""
    found = []
    for num_tiles in (1, 4):
        model = tiny_model()
        it = Trained(model, num_tiles)
        torch.manual_seed(1)
        options = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"])
        it.model = get_peft_model(model, options)
        found.append(it.step())
        assert it.handle.mlp_tiles == (num_tiles,) * 2
        it.handle.unpatch()
        assert all("forward" not in vars(module) for module in model.modules())
    assert_near(found[1], found[0])
    assert sum("mlp.modules_to_save" in name for name in found[0]) == 2 * 3


@pytest.mark.parametrize("policy", ["none", "full", "attention"])
def test_dropout_of_adapters_has_the_gradient_of_its_loss(policy: CheckpointPolicy) -> None:
    """Against a difference of losses under the same random numbers."""
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(dtype=torch.float64), adapter(lora_dropout=0.4))
    it = Trained(model.double().train(), 4, checkpoint=policy)
    name, weight = next((n, p) for n, p in model.named_parameters() if "gate_proj.lora_B" in n)

    def loss(step: float) -> Tensor:
        torch.manual_seed(3)
        with torch.no_grad():
            weight.add_(step * direction)
        value = it.loss()
        with torch.no_grad():
            weight.sub_(step * direction)
        return value.detach()

    direction = torch.zeros_like(weight)
    torch.manual_seed(3)
    grad = it.step()[name]
    direction = grad / grad.norm()
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert relative_error(difference, grad.norm()) < 1e-6


def sharded(num_tiles: int, rank: int, how: str, policy: CheckpointPolicy) -> Gradients:
    """Gradients of two passes that add up, under FSDP2 or DDP; shards of different rows."""
    if how == "adapters":
        it = adapted(num_tiles, before=True, policy=policy)
    else:
        it = Trained(tiny_model(), num_tiles, checkpoint=policy)
    if num_tiles > 1:  # ranks need not agree on the number
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
    it = Trained(tiny_model(), 4, ulysses_degree=2, checkpoint="attention")
    assert_near(it.step(), Trained(tiny_model(), 1, ulysses_degree=2).step())
    mesh = init_device_mesh("cpu", (2,))
    for given, module in ((4, it), (None, Trained(tiny_model(), None))):
        fully_shard(module.handle.model.get_decoder().layers[0].mlp.gate_proj, mesh=mesh)
        if given is None:
            module.step()
            assert module.handle.mlp_tiles == (1, 1)
            continue
        with pytest.raises(ValueError, match=r"mlp_tiles=4: FSDP2 is around 'gate_proj'.*as a wh"):
            module.step()


def test_on_two_ranks() -> None:
    run_distributed(check_on_two_ranks, 2)


@pytest.fixture
def aot_eager() -> Any:
    """Traced and differentiated as ever, but no code is generated, which would take minutes."""
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_stance("default", force_backend="aot_eager")
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("parts", ["all", "mlps"])
def test_compiled_mlps(patched_first: bool, parts: str) -> None:
    """What is compiled is a tile, for all layers together: with gradients and without, of one
    length and of any."""
    wanted = [Trained(deep_model(), 1).step(length) for length in (31, 37, 41)]
    model = deep_model()

    def compile_parts() -> None:
        if parts == "all":
            fuse_layers(model, "compile")
        for mlp in dense_mlps(model):
            mlp.compile()  # type: ignore[union-attr]

    if not patched_first:
        compile_parts()
    it = Trained(model, 4, checkpoint="attention")
    if patched_first:
        compile_parts()
    for length, step in zip((31, 37, 41), wanted, strict=True):
        assert_near(it.step(length), step, 1e-5)
    assert it.handle.mlp_tiles == (4,) * 9
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 4 if parts == "mlps" else 4 < graphs < 3 * 5
    it.step(29)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["unimplemented"], "a limit on recompiling was not met"
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.mark.usefixtures("aot_eager")
def test_dropout_is_not_compiled() -> None:
    """Compiled code might draw other numbers for backward."""
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(tiny_model(), adapter(lora_dropout=0.4))
        it = Trained(model.train(), 4, checkpoint="attention")
        if is_compiled:
            for mlp in dense_mlps(it.handle.model):
                mlp.compile()  # type: ignore[union-attr]
        torch.manual_seed(3)
        found.append(it.step())
    assert_near(found[1], found[0])
    assert not counters["stats"]["unique_graphs"]


def deep_model() -> Any:
    return tiny_model(num_hidden_layers=9)


@pytest.mark.parametrize("patched_first", [True, False])
def test_liger_kernel_before_or_after_patch(
    patched_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives MLPs a forward of their own, which stays when the patch goes."""

    def apply(model: Any, options: dict[str, Any]) -> None:
        for mlp in dense_mlps(model):
            assert "forward" not in vars(mlp)
            mlp.forward = MethodType(doubled, mlp)

    def doubled(mlp: Any, hidden: Tensor) -> Tensor:
        return 2 * type(mlp).forward(mlp, hidden)

    monkeypatch.setattr(liger, "apply_liger_kernel", apply)
    monkeypatch.setattr(Package, "problem", lambda package: None)
    monkeypatch.setattr(fused_layers, "runs_triton", lambda: True)
    model = tiny_model()
    fuse_layers(model, "liger")
    wanted = Trained(model, 1).step()
    model = tiny_model()
    if not patched_first:
        fuse_layers(model, "liger")
    it = Trained(model, 4)
    if patched_first:
        fuse_layers(model, "liger")
    assert_near(it.step(), wanted)
    assert it.handle.mlp_tiles == (4, 4)
    it.handle.unpatch()
    assert all(mlp.forward.__func__ is doubled for mlp in dense_mlps(model))  # type: ignore[union-attr]


def test_the_number_follows_the_memory() -> None:
    model = tiny_model()
    per_token = 3 * 96 * 4  # in float32
    undo = bind_mlps(model, None, lambda _: 16 * 10 * per_token)
    for length, wanted in ((5, 1), (6, 2), (31, 7)):  # tokens of two rows
        ids = torch.zeros(2, length, dtype=torch.long)
        model(input_ids=ids)
        assert tiles_of_layers(model) == (wanted, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert tiles_of_layers(model) == (4, 4)
    undo()
    it = Trained(model, None)
    it.step()
    assert it.handle.mlp_tiles == (1, 1), "no memory is counted on CPU"


def test_unpatch_restores_the_mlps() -> None:
    model = tiny_model()
    mlps = [layer.mlp for layer in decoder_layers(model)]  # type: ignore[misc]
    before = [dict(vars(mlp)) for mlp in mlps]
    names = list(model.state_dict())
    it = Trained(model, 4)
    it.step()
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(mlps[0])
    assert copied.forward.module is copied
    it.handle.unpatch()
    assert [dict(vars(mlp)) for mlp in mlps] == before
    patch(model, LongContextConfig(mlp_tiles=1))
    assert [dict(vars(mlp)) for mlp in mlps] == before
