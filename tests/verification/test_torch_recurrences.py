"""Models are verified on the CPU where packages of kernels are installed, which need a GPU."""

from typing import Any

import pytest
import torch
from torch import nn

from longctx_patch import LongContextConfig, verify_on_virtual_ranks
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
from longctx_patch.verification.shrink import build_small_model
from tests.hf.call.test_mixers import CHAINED, install
from tests.hf.float64 import padded_rows
from tests.hf.tiny import featured_config, featured_model

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
