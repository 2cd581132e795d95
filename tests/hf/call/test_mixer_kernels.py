"""Kernels of recurrent layers: those that are installed must take a model's sizes."""

from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from longctx_patch import LongContextConfig, patch
from longctx_patch.hf.call import mixer_kernels
from longctx_patch.hf.call.mixers import check_mixers
from longctx_patch.hf.model import transformers_api
from tests.hf.call.test_mixers import CHAINED
from tests.hf.tiny import featured_model

TORCH = LongContextConfig(torch_recurrence=True)
SIZED = {
    "qwen3_5_text": (
        {"linear_key_head_dim": 257},
        "Qwen3_5GatedDeltaNet with 257 numbers of a key head: the kernels of "
        "flash-linear-attention take up to 256",
    ),
    "kimi_linear": (
        {"linear_head_dim": 258},
        "KimiLinearDeltaAttention with 258 numbers of a key head: the kernels of flash-linear",
    ),
    "bamba": (
        {"mamba_d_conv": 5},
        "BambaMixer with 5 tokens of a convolution: the kernels of causal-conv1d take up to 4",
    ),
}


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    """Parameters say that they are, and so many packages are installed."""
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(
        mixer_kernels,
        "find_spec",
        lambda package: ModuleSpec(package, None) if package in installed else None,
    )


@pytest.mark.parametrize("family", [family for family in SIZED if family in CHAINED])
def test_sizes_that_kernels_do_not_take_are_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, says = SIZED[family]
    packages = {package for package, _ in transformers_api.KERNEL_PACKAGES.values()}
    model: Any = featured_model(family, **sizes)
    with monkeypatch.context() as patched:
        on_a_gpu(patched, packages)
        for config in (LongContextConfig(), TORCH):
            with pytest.raises(ValueError, match=f"{says}.*pip uninstall "):
                patch(model, config)
        on_a_gpu(patched, set())
        check_mixers(model, TORCH, None)
    patch(model, LongContextConfig()).unpatch()


@pytest.mark.parametrize("family", CHAINED)
def test_sizes_that_kernels_take_are_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each layer's sizes are found under their names."""
    on_a_gpu(monkeypatch, {package for package, _ in transformers_api.KERNEL_PACKAGES.values()})
    model = featured_model(family)
    assert transformers_api.recurrent_modules(model)
    check_mixers(model, LongContextConfig(), None)
    for mixer in transformers_api.recurrent_modules(model):
        for name, limit in mixer_kernels.LIMITS.items():
            if name in transformers_api.code_of(type(mixer)).__code__.co_names:
                assert 2 <= limit.of(mixer) <= limit.most
