"""LoRA in few products gives PEFT's numbers and gradients, with what PEFT's own code would keep or
less, and leaves every other kind of layer to PEFT."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longctx_patch import LongContextConfig, patch
from longctx_patch.hf.layers import lora_products
from longctx_patch.hf.layers.lora_products import bind_adapters
from tests.hf.tiny import tiny_model

ROWS, INPUTS, OUTPUTS, RANK = 6, 24, 40, 4


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS, bias=bias)
        self.second = nn.Linear(OUTPUTS, INPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(*, has_bias: bool = True, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    given: dict[str, Any] = {"r": RANK, "lora_alpha": 6, "target_modules": ["first", "second"]}
    model: Any = get_peft_model(Block(has_bias), LoraConfig(**given | options))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


def numbers(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradient of the input and of each weight, for a loss that tells outputs apart."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel()).cos().view_as(out).to(out.dtype))
    found = {"out": out.detach(), "x": x.grad}
    found |= {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


def assert_same(model: nn.Module, x: Tensor, tolerance: float) -> None:
    wanted = numbers(copy.deepcopy(model), x)
    undo = bind_adapters(model)
    found = numbers(model, x)
    undo()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value is not None
        assert found[name].dtype == value.dtype
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error <= tolerance, name


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often layers ran by few products."""
    counts: Counter[str] = Counter()
    apply = lora_products._LoraProducts.apply

    def counted(*given: Any) -> Any:
        counts["apply"] += 1
        return apply(*given)

    monkeypatch.setattr(lora_products._LoraProducts, "apply", counted)
    return counts


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(ROWS, INPUTS), (2, ROWS, INPUTS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_numbers_of_peft(
    has_bias: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
    applied: Counter[str],
) -> None:
    model = adapted(has_bias=has_bias).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    assert_same(model, x, tolerance)
    assert applied["apply"] == 2


def test_a_result_can_be_changed_in_place() -> None:
    """As Llama 4 does with its queries."""
    model = adapted()
    bind_adapters(model)
    out = model.base_model.model.first(torch.randn(2, ROWS, INPUTS))
    out.mul_(2).sum().backward()


def test_no_tokens_at_all() -> None:
    model = adapted()
    bind_adapters(model)
    out = model(torch.zeros(1, 0, INPUTS))
    assert out.shape == (1, 0, INPUTS)
    out.sum().backward()
    assert all(float(p.grad.abs().sum()) == 0 for n, p in model.named_parameters() if "lora_" in n)


def test_gradients_by_differences() -> None:
    """Independent of PEFT: the function's own gradients against finite differences."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, down, up = draw(2, 3, 5).requires_grad_(), draw(2, 5).requires_grad_(), draw(4, 2)
    weight, bias = draw(4, 5), draw(4)
    up.requires_grad_()

    def of(x: Tensor, down: Tensor, up: Tensor) -> Any:
        return lora_products._products(0.7, x, weight, bias, down, up)

    assert torch.autograd.gradcheck(of, (x, down, up))
    whole = x.detach() @ (weight + 0.7 * up @ down).T.detach() + bias
    torch.testing.assert_close(of(x, down, up).detach(), whole)


def test_autocast_rounds_as_peft_does(applied: Counter[str]) -> None:
    """Adapters in float32 beside bfloat16, as PEFT makes them: products run in bfloat16."""
    model = adapted()
    for name, weight in model.named_parameters():
        weight.data = weight.data if "lora_" in name else weight.data.to(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    x = torch.randn(64, INPUTS).to(torch.bfloat16)
    wanted = numbers(exact, x.double())
    errors = []
    for bind in (lambda _: None, bind_adapters):
        bind(model)
        with torch.autocast("cpu", torch.bfloat16):
            found = numbers(model, x)
        assert found["out"].dtype == torch.bfloat16
        assert found["base_model.model.first.lora_A.default.weight"].dtype == torch.float32
        parts = [(found[n].double() - w).norm() / w.norm() for n, w in wanted.items()]
        errors.append(torch.stack(parts))
    assert applied["apply"] == 2
    assert bool((errors[1] < 0.02).all())
    assert bool((errors[1] < 1.5 * errors[0]).all())


class Wide(TorchDispatchMode):
    """Counts operations that write a tensor as large as a layer's input or output."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        shares = {"detach", "_unsafe_view", "new_empty"}
        is_new = isinstance(out, Tensor) and not func.is_view
        is_new = is_new and func.overloadpacket.__name__ not in shares
        if is_new and out.ndim > 1 and out.shape[0] == 512 and out.shape[-1] >= INPUTS:
            self.names[func.overloadpacket.__name__] += 1
        return out


def test_each_layer_writes_each_large_tensor_once_and_adds_once() -> None:
    """Forward: a product and one that adds; backward: the same for the gradient of the input."""
    model = adapted(has_bias=False)
    bind_adapters(model)
    x, grad = torch.randn(512, INPUTS, requires_grad=True), torch.ones(512, OUTPUTS)
    with Wide() as wide:
        model.base_model.model.first(x).backward(grad)
    assert wide.names == {"mm": 2, "addmm_": 2}


def test_a_recompute_leaves_out_the_last_base_product() -> None:
    """Nobody needs its values, as with a linear layer of torch's."""
    model = adapted()
    bind_adapters(model)
    x = torch.randn(512, INPUTS)
    wanted = numbers(model, x)
    x.requires_grad_()
    with Wide() as in_forward:
        out = checkpoint(model, x, use_reentrant=False)
    with Wide() as in_backward:
        out.backward(torch.linspace(-1, 1, out.numel()).cos().view_as(out))
    assert in_forward.names == {"addmm": 1, "mm": 1, "addmm_": 2, "tanh": 1}
    backward = {"mm": 2, "addmm_": 2, "tanh_backward": 1}
    assert in_backward.names == Counter({"addmm": 1, "addmm_": 1, "tanh": 1}) + Counter(backward)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted["x"])
    for name, weight in model.named_parameters():
        assert weight.grad is None or torch.equal(weight.grad, wanted[name])


def test_the_input_is_kept_once_for_layers_that_share_it() -> None:
    model = adapted(has_bias=False)
    bind_adapters(model)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x, first = torch.randn(64, INPUTS, requires_grad=True), model.base_model.model.first
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = first(x) + first(x)
    beside = {pointer: size for pointer, size in kept.items() if pointer not in weights}
    assert sum(beside.values()) == 4 * 64 * (INPUTS + 2 * RANK)
    assert out.requires_grad


OTHERS: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.5},
    "DoRA": {"use_dora": True},
    "bias of the adapter": {"lora_bias": True},
    "trained bias": {"bias": "all"},
    "trained base": {},
    "two adapters": {},
    "a hook": {},
    "switched off": {},
    "merged": {},
    "dtypes that differ": {},
    "a hook on dropout": {},
    "dropout of ones own": {},
    "a forward around PEFT's": {},
    "scaling that is learned": {},
}


class Tripled(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_run_as_peft_wrote_them(
    kind: str, applied: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = adapted(**OTHERS[kind]), torch.randn(ROWS, INPUTS)
    first = model.base_model.model.first
    if kind == "trained base":
        for layer in (first, model.base_model.model.second):
            layer.base_layer.weight.requires_grad_()
    elif kind == "two adapters":
        model.add_adapter("more", LoraConfig(r=2, target_modules=["first", "second"]))
        model.base_model.set_adapter(["default", "more"])
    elif kind == "a hook":
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                layer.lora_A["default"].register_forward_hook(lambda *_: None)
    elif kind == "switched off":
        model.base_model.disable_adapter_layers()
    elif kind == "merged":
        model.merge_adapter()
    elif kind == "dtypes that differ":
        for layer in (first, model.base_model.model.second):
            layer.base_layer.to(torch.float64)
        x = x.double()
    for layer in (first, model.base_model.model.second):
        if kind == "a hook on dropout":
            layer.lora_dropout["default"].register_forward_hook(lambda *given: 2 * given[-1])
        elif kind == "dropout of ones own":
            layer.lora_dropout["default"] = Tripled(0.0)
        elif kind == "scaling that is learned":
            layer.scaling["default"] = nn.Parameter(torch.tensor([1.5]))
    if kind == "a forward around PEFT's":
        own = LoraLinear.forward
        monkeypatch.setattr(LoraLinear, "forward", lambda *given: 2 * own(*given))
    torch.manual_seed(1)
    wanted = copy.deepcopy(model)(x)
    bind_adapters(model)
    torch.manual_seed(1)
    is_fused = kind == "trained bias"  # the second layer has none
    tolerance = 1e-5 if is_fused else 0.0
    torch.testing.assert_close(model(x), wanted, rtol=tolerance, atol=tolerance)
    assert applied["apply"] == is_fused


def test_backward_within_autocast() -> None:
    """A float32 island, or a loop that goes backward inside of its context."""
    model, x = adapted(), torch.randn(ROWS, INPUTS)
    wanted = numbers(copy.deepcopy(model), x)
    bind_adapters(model)
    given = x.clone().requires_grad_()
    out = model(given)
    with torch.autocast("cpu", torch.bfloat16):
        out.backward(torch.linspace(-1, 1, out.numel()).cos().view_as(out))
    torch.testing.assert_close(given.grad, wanted["x"])


def test_functions_of_torch_func_run_as_peft_wrote_them(applied: Counter[str]) -> None:
    model, x = adapted(), torch.randn(ROWS, INPUTS)
    wanted = torch.func.grad(lambda given: model(given).sum())(x)
    along = torch.func.jvp(model, (x,), (x,))[1]
    bind_adapters(model)
    torch.testing.assert_close(torch.func.grad(lambda given: model(given).sum())(x), wanted)
    torch.testing.assert_close(torch.func.jvp(model, (x,), (x,))[1], along)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(found, along)
    assert not applied
    out = model(x.requires_grad_())
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_hooks_on_all_modules_see_all_products() -> None:
    model, x = adapted(), torch.randn(ROWS, INPUTS, requires_grad=True)
    seen: Counter[str] = Counter()
    hook = register_module_full_backward_hook(lambda m, *_: seen.update([type(m).__name__]))
    model(x).sum().backward()
    wanted = dict(seen)
    seen.clear()
    bind_adapters(model)
    model(x).sum().backward()
    hook.remove()
    assert dict(seen) == wanted


def test_other_tensors_and_calls(applied: Counter[str]) -> None:
    model = adapted()
    layer = model.base_model.model.first
    bind_adapters(model)
    x = torch.randn(ROWS, INPUTS)
    torch.testing.assert_close(layer(x=x), layer(x))
    assert model.to("meta")(x.to("meta")).shape == (ROWS, INPUTS)
    assert applied["apply"] == 2


def test_a_forward_that_somebody_kept_is_pefts_after_unpatch(applied: Counter[str]) -> None:
    """As Accelerate's hooks keep a module's forward, to put it back."""
    model, x = adapted(), torch.randn(ROWS, INPUTS)
    undo = bind_adapters(model)
    kept = vars(model.base_model.model.first)["forward"]
    undo()
    vars(model.base_model.model.first)["forward"] = kept
    model(x)
    assert not applied


def test_one_of_several_adapters_and_dropout_in_evaluation(applied: Counter[str]) -> None:
    model, x = adapted(lora_dropout=0.5), torch.randn(ROWS, INPUTS)
    model.add_adapter("more", LoraConfig(r=2, target_modules=["first"], init_lora_weights=False))
    model.eval()
    bind_adapters(model)
    for name, layers in (("default", 2), ("more", 1)):
        model.set_adapter(name)
        applied.clear()
        found = model(x)
        assert applied["apply"] == layers
        stock = model.merge_and_unload if name == "more" else copy.deepcopy(model).merge_and_unload
        torch.testing.assert_close(found, stock()(x))


def test_patch_binds_layers_and_unpatch_frees_them() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear"))
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    handle = patch(model, LongContextConfig())
    assert layers
    assert all("forward" in vars(layer) for layer in layers)
    handle.unpatch()
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_step_never_walks_the_model_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters on 36 layers make 3,000 modules: `parameters()` held up each step by 17 ms."""
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear"))
    patch(model, LongContextConfig(checkpoint="auto"))
    given = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    model(**given).loss.backward()
    walked: list[nn.Module] = []
    walk = nn.Module._named_members

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walked.append(module)
        return walk(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_named_members", noted)
    model(**given).loss.backward()
    assert not walked
