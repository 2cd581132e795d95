"""Recurrent layers of which little is trained: an exchange has a backward only where something that
goes into it has a gradient, on every rank or on none."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longctx_patch import LongContextConfig, PatchHandle
from tests.hf.by_documents import stock_step, whole_row
from tests.hf.call.test_mixers import CHAINED, LENGTH, TOLERANCE, assert_exact
from tests.hf.float64 import in_float64
from tests.hf.on_ranks import on_ranks
from tests.reference import relative_error

CONFIGS: dict[str, LongContextConfig] = {
    "contiguous": LongContextConfig(ring_degree=2, layout="contiguous"),
    "zigzag": LongContextConfig(ring_degree=2, checkpoint="full"),
    "heads": LongContextConfig(ulysses_degree=2, recurrent_exchange="heads"),
    "both": LongContextConfig(
        ulysses_degree=2, ring_degree=2, layout="contiguous", checkpoint="attention"
    ),
}
TRAINED = [
    # Of the state alone, so that no input of a recurrence has a gradient.
    ("qwen3_5_text", "A_log"),
    ("bamba", "A_log"),
    ("bamba", "mamba.D"),
    ("bamba", "dt_bias"),
    ("nemotron_h", "A_log"),
    # Of the convolution alone.
    ("lfm2", "conv.conv.weight"),
    ("bamba", "conv1d"),
    ("qwen3_5_text", "linear_attn.norm"),
    ("kimi_linear", "A_log"),
]


@pytest.mark.parametrize(
    ("family", "trained", "config"),
    [
        (*each, config)
        for number, each in enumerate(TRAINED)
        for config in list(CONFIGS)[number % 2 :: 2]
        if each[0] in CHAINED and (each[0], config) != ("lfm2", "heads")  # it has none
    ],
)
def test_few_weights_are_trained(family: str, trained: str, config: str) -> None:
    """Ranks that sent a state waited for its gradient, which others did not come to."""
    model = in_float64(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert assert_exact(model, CONFIGS[config]).grads


@pytest.mark.parametrize(
    ("targets", "config"),
    [("out_proj o_proj", name) for name in CONFIGS]
    + [("in_proj_a in_proj_b", "heads"), ("in_proj_z", "both"), ("up_proj", "both")],
)
def test_adapters_on_some_projections(targets: str, config: str) -> None:
    """The first step's check expected a backward of every exchange, and refused the second step.
    With adapters on MLPs alone the first recurrent layer has none, but is recomputed."""
    adapter = LoraConfig(target_modules=targets.split(), init_lora_weights=False)
    model = get_peft_model(in_float64("qwen3_5_text"), adapter)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert assert_exact(model, CONFIGS[config]).grads


@pytest.mark.parametrize("family", [name for name in ("bamba", "qwen3_5_text") if name in CHAINED])
def test_gradients_of_some_weights_are_asked_for(family: str) -> None:
    """By torch.autograd.grad, of a model of which all is trained."""
    model = in_float64(family)
    named = dict(model.named_parameters())
    name = next(name for name in named if "A_log" in name)
    wanted = stock_step(copy.deepcopy(model), (LENGTH,)).grads[name]

    def ask(model: Any, _: PatchHandle) -> torch.Tensor:
        loss = model(**whole_row((LENGTH,))).loss
        return torch.autograd.grad(loss, [dict(model.named_parameters())[name]])[0]

    mean = torch.stack(on_ranks(model, CONFIGS["contiguous"], ask)).mean(0)
    assert relative_error(mean, wanted) < TOLERANCE
