"""A model on virtual ranks is compared with the stock model in one process, or refused."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    patch,
    run_virtual_ranks,
    verify_on_virtual_ranks,
    virtual_group,
)
from longctx_patch.hf.loss import shard_loss
from longctx_patch.hf.model.sequence_kernels import (
    functions_of,
    run_torch_recurrences,
    runs_kernel,
    torch_function,
)
from longctx_patch.hf.model.transformers_api import (
    SEQUENCE_FUNCTIONS,
    code_of,
    recurrent_modules,
)
from longctx_patch.loss.law import Scale
from longctx_patch.transport import VirtualTransport
from longctx_patch.verification.shrink import build_small_model
from tests.hf.call.test_mixers import CHAINED, install
from tests.hf.float64 import TOKENS, packed_row, padded_rows
from tests.hf.steps import collated, on_ranks
from tests.hf.tiny import featured_config, featured_model, tiny_model, token_rows

RING = LongContextConfig(ring_degree=4)
TWO = LongContextConfig(ring_degree=2)


@pytest.mark.parametrize(
    "config",
    [
        LongContextConfig(),
        RING,
        LongContextConfig(ulysses_degree=2, ring_degree=2, checkpoint="attention", mlp_tiles=2),
        LongContextConfig(ulysses_degree=4, checkpoint="full", loss="logits"),
        LongContextConfig(ring_degree=3, layout="contiguous"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [padded_rows(), packed_row()], ids=["padded", "packed"])
def test_every_gradient_is_that_of_the_stock_model(
    config: LongContextConfig, batch: dict[str, Tensor]
) -> None:
    model = tiny_model()
    found = verify_on_virtual_ranks(model, config, batch)
    assert found.ok, str(found)
    assert set(found.grad_rel_errs) == {name for name, _ in model.named_parameters()}
    assert (found.messages > 0) == (config.sequence_degree > 1)
    assert "equal to the stock model within 1e-05" in str(found)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_recurrent_layers_are_compared_in_float64(family: str) -> None:
    """float32 keeps few digits of the gradients of decays, in the stock model too."""
    adapter = LoraConfig(target_modules=["q_proj", "in_proj", "in_proj_qkv"])
    for model in (featured_model(family), get_peft_model(featured_model(family), adapter)):
        found = verify_on_virtual_ranks(model, TWO, padded_rows())
        assert found.ok, str(found)
        assert found.tolerance == 1e-10
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="several documents in a row on the stock path"):
        verify_on_virtual_ranks(featured_model(family), TWO, packed_row())


def test_a_model_in_float64_is_compared_in_it() -> None:
    found = verify_on_virtual_ranks(tiny_model().double(), RING, padded_rows())
    assert found.ok, str(found)
    assert "equal to the stock model within 1e-10" in str(found)


def test_an_adapter_is_compared_and_the_model_stays_as_it_was() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear")).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = verify_on_virtual_ranks(model, RING, padded_rows())
    assert found.ok, str(found)
    assert all("lora_" in name for name in found.grad_rel_errs)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    patch(model, LongContextConfig()).unpatch()  # nothing was left behind


def test_a_wrong_number_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_label_more(
        num_items: float | None, *, group_labels: int, group_ranks: int, training: bool
    ) -> Scale:
        return Scale(group_labels + 1, group_ranks)

    monkeypatch.setattr(shard_loss, "replica_scale", one_label_more)
    found = verify_on_virtual_ranks(tiny_model(), TWO, padded_rows())
    assert not found.ok
    assert found.grad_rel_errs[found.worst_parameter] > 0.01
    assert "NOT equal to the stock model" in str(found)


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in padded_rows().items() if key != name}


def lora_with_dropout() -> nn.Module:
    adapter = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
    return get_peft_model(tiny_model(), adapter)


def patched_model() -> nn.Module:
    model = tiny_model()
    patch(model, LongContextConfig())
    return model


@pytest.mark.parametrize(
    ("make", "config", "batch", "says"),
    [
        (lambda: tiny_model("mistral", attention_dropout=0.5), TWO, padded_rows(), "dropout=0.5"),
        (tiny_model, LongContextConfig(ulysses_degree=8), padded_rows(), "query heads"),
        (tiny_model, TWO, without("labels"), "whole rows without labels in training"),
        (tiny_model, TWO, without("attention_mask") | {"position_ids": 3}, "position_ids"),
        (lambda: tiny_model().bfloat16(), TWO, padded_rows(), r"bfloat16 .*Give model\.to\('cpu'"),
        (lambda: tiny_model().requires_grad_(False), TWO, padded_rows(), "unfreeze some"),
        (lora_with_dropout, TWO, padded_rows(), r"dropout of 0.1 .*lora_dropout=0 for an adapter"),
        (patched_model, TWO, padded_rows(), "a patched model can't be copied or pickled"),
    ],
)
def test_what_can_not_be_compared_is_refused_as_patch_does(
    make: Any, config: LongContextConfig, batch: dict[str, Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        verify_on_virtual_ranks(make(), config, batch)


def test_labels_of_a_shard_need_processes() -> None:
    """Their loss is scaled by the number of processes, which virtual ranks are not."""

    def refuse(model: Any, handle: PatchHandle) -> None:
        with pytest.raises(ValueError, match=r"virtual ranks are threads of one. Give .* whole"):
            model(**collated(handle, token_rows(TOKENS)))

    on_ranks(tiny_model(), TWO, refuse)


def test_a_group_of_another_config_is_refused() -> None:
    def on_one_rank(transport: VirtualTransport) -> None:
        group = virtual_group(transport, TWO)
        with pytest.raises(ValueError, match=r"give group\.config as the config"):
            patch(tiny_model(), RING, group=group)

    run_virtual_ranks(2, on_one_rank)


FAMILIES = {"qwen3_5_text", "falcon_h1", "kimi_linear", "lfm2"} & set(CHAINED)


def needs_gpu(*args: Any, **options: Any) -> Any:
    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def without_gpu(model: Any, patched: pytest.MonkeyPatch) -> None:
    """All functions along the sequence are kernels, which refuse the CPU."""
    for mixer in recurrent_modules(model):
        namespace = code_of(type(mixer)).__globals__
        for name in SEQUENCE_FUNCTIONS & namespace.keys():
            patched.setitem(namespace, name, install(namespace[name], needs_gpu))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_virtual_ranks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself keeps its kernels."""
    model = featured_model(family)
    without_gpu(model, monkeypatch)
    found = verify_on_virtual_ranks(model, LongContextConfig(ring_degree=2), padded_rows())
    assert found.ok, str(found)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        model(**padded_rows())


def test_layers_are_of_their_classes_with_other_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = featured_model("falcon_h1")
    without_gpu(model, monkeypatch)
    before = [type(mixer) for mixer in recurrent_modules(model)]
    run_torch_recurrences(model)
    for mixer, cls in zip(recurrent_modules(model), before, strict=True):
        assert isinstance(mixer, cls)
        assert (type(mixer).__module__, type(mixer).__name__) == (cls.__module__, cls.__name__)
        assert not any(map(runs_kernel, functions_of(mixer).values()))
        namespace = code_of(cls).__globals__
        assert all(runs_kernel(namespace[name]) for name in functions_of(mixer))
    assert len({type(mixer) for mixer in recurrent_modules(model)}) == len(set(before))


class OfHub(nn.Module):
    """As `kernels` makes of a function, with a kernel in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = needs_gpu


def test_a_kernel_of_the_hub_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = featured_model("bamba")
    namespace = code_of(type(recurrent_modules(model)[0])).__globals__
    func = namespace["causal_conv1d_fn"]

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        return func(*args, **options)

    monkeypatch.setattr(OfHub, "forward", forward)
    monkeypatch.setitem(namespace, "causal_conv1d_fn", OfHub())
    assert torch_function(namespace["causal_conv1d_fn"]) is torch_function(func)
    assert runs_kernel(namespace["causal_conv1d_fn"])
    found = verify_on_virtual_ranks(model, LongContextConfig(ring_degree=2), padded_rows())
    assert found.ok, str(found)


def test_the_small_model_that_processes_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    config = featured_config("qwen3_5_text")
    without_gpu(featured_model("qwen3_5_text"), monkeypatch)
    model = build_small_model(config, torch.float64)
    assert torch.isfinite(model(**padded_rows()).loss)
