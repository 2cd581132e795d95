"""LoRA on experts by its factors gives PEFT's numbers and gradients, makes nothing as large as all
experts' weights, and leaves what it can't do to PEFT."""

import copy
from collections import Counter
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longctx_patch import LongContextConfig, verify_on_virtual_ranks
from longctx_patch.hf.layers import lora_experts
from longctx_patch.hf.layers.lora_products import bind_adapters
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.float64 import padded_rows
from tests.hf.tiny import gradients, tiny_model
from tests.memory.trained import Trained, averaged

STACKED = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS: dict[str, Any] = {"qwen3_5_moe_text": {"target_parameters": STACKED}}
"""What PEFT is told of families whose experts `all-linear` doesn't find."""
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", *TARGETS)


def adapted(family: str = "qwen3_moe", *, rank: int = 4, **sizes: Any) -> Any:
    model = tiny_model(family, **sizes)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **TARGETS.get(family, {})}
    wrapped = get_peft_model(model, LoraConfig(r=rank, lora_alpha=6, **options))
    generator = torch.Generator().manual_seed(0)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return wrapped


def numbers(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(2, 26).view(2, 12)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {"loss": loss.detach(), **gradients(model)}
    model.zero_grad()
    return found


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm().clamp(min=1e-9)) for n, w in wanted.items())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts products of adapted weights."""
    counts: Counter[str] = Counter()
    stock = vars(lora_experts._AdaptedWeight)["__torch_function__"].__func__

    def counted(cls: Any, *given: Any) -> Any:
        counts["products"] += 1
        return stock(cls, *given)

    monkeypatch.setattr(lora_experts._AdaptedWeight, "__torch_function__", classmethod(counted))
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_peft(family: str, products: Counter[str]) -> None:
    model = adapted(family)
    wanted = numbers(model)
    undo = bind_adapters(model)
    assert error(numbers(model), wanted) < 1e-5
    num_layers = len(model.get_base_model().get_decoder().layers)
    assert products["products"] == 2 * num_layers
    assert sum("experts" in name for name in wanted) == 4 * num_layers
    undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_group_of_ranks() -> None:
    found = verify_on_virtual_ranks(adapted(), LongContextConfig(ring_degree=2), padded_rows())
    assert found.ok, str(found)


def sharded_step(checkpoint: CheckpointPolicy, *, by_peft: bool) -> dict[str, Tensor]:
    """Loss and gradients of a step under FSDP2, both ranks sharing the row."""
    it = Trained(adapted(), ulysses_degree=2, checkpoint=checkpoint)
    if by_peft:
        for module in it.model.modules():
            if isinstance(vars(module).get("forward"), lora_experts.ExpertsForward):
                vars(module)["forward"].is_bound = False
    it.shard()
    found = it.step(37)
    it.handle.unpatch()
    return {name: averaged(value) for name, value in found.items()}


def check_sharded_steps(rank: int) -> None:
    wanted = sharded_step("none", by_peft=True)
    assert error(sharded_step("attention", by_peft=False), wanted) < 1e-5


def test_experts_sharded_over_two_ranks() -> None:
    run_distributed(check_sharded_steps, 2)


class Large(TorchDispatchMode):
    """Counts operations that make as many numbers as all experts of a layer have."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.found = numbers, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor) and not func.is_view and out.numel() >= self.numbers:
            self.found[func.overloadpacket.__name__] += 1
        return out


def test_nothing_is_as_large_as_all_experts() -> None:
    """PEFT adds up all weights, and takes the gradient of the sum."""
    model = adapted(num_experts=8, moe_intermediate_size=96, vocab_size=64)
    experts = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "act_fn"))
    numbers_of_all = experts.down_proj.numel()
    with Large(numbers_of_all) as by_peft:
        numbers(model)
    assert by_peft.found
    bind_adapters(model)
    with Large(numbers_of_all) as large:
        numbers(model)
    assert not large.found - Counter(detach=large.found["detach"])


OTHERS = ("eager", "switched off", "merged", "rank", "trained", "hook", "inner forward")


@pytest.mark.parametrize("kind", OTHERS)
def test_others_run_as_peft_wrote_them(kind: str, products: Counter[str]) -> None:
    model = adapted(rank=3 if kind == "rank" else 4)
    experts = [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "act_fn")]
    experts = [m for m in experts if hasattr(m, "num_experts")]
    assert experts
    if kind == "eager":
        model.get_base_model().set_experts_implementation("eager")
    elif kind == "switched off":
        model.base_model.disable_adapter_layers()
    elif kind == "merged":
        model.merge_adapter()
    elif kind == "trained":
        for each in experts:
            each.down_proj.requires_grad_()
    elif kind == "hook":
        for each in experts:
            each.register_forward_hook(lambda *_: None)
    elif kind == "inner forward":  # as Accelerate's hooks put one there
        for each in model.modules():
            inner: Any = getattr(each, "base_layer", None)
            if type(inner) is type(each) and type(each).__name__ == "ParamWrapper":
                vars(inner)["forward"] = MethodType(type(inner).forward, inner)
    ids = torch.arange(2, 26).view(2, 12)
    wanted = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits
    bind_adapters(model)
    for module in model.modules():  # linear layers as they were
        if type(module).__name__ == "Linear" and "forward" in vars(module):
            del vars(module)["forward"]
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, rtol=0, atol=0)
    assert not products


def test_an_adapted_weight_is_a_factor_and_nothing_else() -> None:
    weight: Any = lora_experts._AdaptedWeight(*(torch.randn(2, 4, 4) for _ in range(3)))
    with pytest.raises(TypeError, match="second factor"):
        torch.bmm(weight, torch.randn(2, 4, 4))
    with pytest.raises(ValueError, match="experts stay the first dimension"):
        weight.transpose(0, 1)
    x = torch.randn(2, 3, 4)
    whole = weight.weight + weight.left @ weight.right
    torch.testing.assert_close(torch.bmm(x, weight), torch.bmm(x, whole))
    turned = torch.bmm(x, weight.transpose(1, 2))
    torch.testing.assert_close(turned, torch.bmm(x, whole.transpose(1, 2)))
