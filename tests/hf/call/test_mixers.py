"""Recurrent layers over virtual ranks against the stock eager model, of which each document runs by
itself: loss and every gradient in float64, and the traffic of each rank as planned.
An exchange has a backward only where something that goes into it has a gradient, on every rank."""

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longctx_patch import LongContextConfig, PatchHandle, UnsupportedModelError, patch
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.family import RECURRENT
from longctx_patch.hf.call.mixers import OVER_CHAIN, check_mixers
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of, torch_function
from longctx_patch.sequence.masks import causal
from longctx_patch.verification.shrink import keep_float64
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.steps import Step, complaints, errors, nothing, on_ranks, step_of_ranks
from tests.hf.tiny import SUPPORTED, featured_model
from tests.reference import relative_error

Function = Callable[..., Any]
CHAINED = [name for name, family in SUPPORTED.items() if set(family.features) & set(RECURRENT)]
LENGTH = 43
"""A prime."""
DOCUMENTS = (1, 2, 17, 3, 1, 19)
"""Some are shorter than the reach of a convolution; long ones go over the edges of shards."""
TOLERANCE = 1e-10

CONFIGS = (
    LongContextConfig(),
    LongContextConfig(ring_degree=2),
    LongContextConfig(ring_degree=3, layout="contiguous", checkpoint="full"),
    LongContextConfig(ulysses_degree=2, ring_degree=2, checkpoint="attention"),
    LongContextConfig(ring_degree=4, layout="contiguous"),
    LongContextConfig(ulysses_degree=3),
)


THOROUGH = [name for name in ("qwen3_5_text", "falcon_h1", "lfm2") if name in SUPPORTED]
"""A family of each kind of layer; `tests/hf/test_states_and_latents.py` runs all."""


@pytest.mark.parametrize(
    "family", [name for name in ("qwen3_5_text", "falcon_h1") if name in SUPPORTED]
)
def test_a_model_in_float64_keeps_states_in_float32(family: str) -> None:
    """As transformers' own functions do, whatever the model's dtype is; ranks exchanged fewer bytes
    than planned, or stopped at a product of two dtypes."""
    model = featured_model(family).double()
    wanted = stock_step(copy.deepcopy(model), (LENGTH,))
    for config in CONFIGS[1:]:
        found = errors(step_of_ranks(model, config, whole_row((LENGTH,))), wanted)
        assert max(found.values()) < 1e-4, (config, found)


def assert_exact(
    model: Any,
    config: LongContextConfig,
    lengths: tuple[int, ...] = (LENGTH,),
    wanted: Step | None = None,
    check: Callable[[PatchHandle], None] = nothing,
) -> Step:
    """Compare with the stock step, which is returned, unless another one is wanted."""
    wanted = wanted or stock_step(copy.deepcopy(model), lengths)
    found = step_of_ranks(model, config, whole_row(lengths), check)
    assert not complaints(found, wanted, config, bound=TOLERANCE)
    return wanted


def install(function: Function, implementation: Function) -> Function:
    """As transformers decides for a kernel."""

    @functools.wraps(torch_function(function))
    def wrapped(*args: Any, **options: Any) -> Any:
        return implementation(*args, **options)

    return wrapped


def install_kernels(
    model: Any, made: Callable[[str, Function], Function | None], patched: pytest.MonkeyPatch
) -> None:
    """What `made(name, stock)` makes of transformers' own functions as kernels in their places."""
    for mixer in transformers_api.recurrent_modules(model):
        for name, function in functions_of(mixer).items():
            if (kernel := made(name, torch_function(function))) is not None:
                namespace = sys.modules[type(mixer).__module__]
                patched.setattr(namespace, name, install(function, kernel))


def test_what_would_go_wrong_is_refused() -> None:
    model = featured_model("bamba")
    with pytest.raises(ValueError, match="a mask with BambaMixer: a recurrence sees all tokens"):
        patch(model, LongContextConfig(), mask=causal)
    striped = LongContextConfig(ring_degree=2, layout="striped")
    with pytest.raises(UnsupportedModelError, match="layout='striped' with "):
        check_model_config(model.config, striped)
    mixer = transformers_api.recurrent_modules(model)[0]
    mixer.forward = lambda *_, **__: None
    with pytest.raises(ValueError, match="the forward of BambaMixer was replaced by"):
        patch(model, LongContextConfig())


class Deaf(torch.nn.Module):
    """As short convolutions were before they took the options of a call."""

    layer_idx = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_fn(hidden_states)  # type: ignore[name-defined] # noqa: F821


def test_layers_that_hear_of_no_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Deaf of the installed .* 'transformers>=5\.22'"):
        check_mixers(torch.nn.Sequential(Deaf()), LongContextConfig(), None)


def test_functions_of_transformers_are_the_ones_that_are_replaced() -> None:
    """And each has its way over a chain."""
    assert set(OVER_CHAIN) == transformers_api.SEQUENCE_FUNCTIONS
    assert set(KERNELS) < transformers_api.SEQUENCE_FUNCTIONS


PROJECTIONS = {
    "qwen3_5_text": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "kimi_linear": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("forget_gate.f_a_proj", "forget_gate.f_b_proj", "b_proj", "g_a_proj", "g_b_proj"),
    ),
    "bamba": ("in_proj", "out_proj"),  # PEFT refuses out_proj in Falcon-H1 and Nemotron-H
    "lfm2": ("in_proj", "out_proj"),
}
ADAPTED = [family for family in PROJECTIONS if family in CHAINED]


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_on_the_projections_are_exact(family: str) -> None:
    torch.manual_seed(3)
    lora = LoraConfig(target_modules=list(PROJECTIONS[family]), r=3, init_lora_weights=False)
    model: Any = get_peft_model(in_float64(family), lora)
    keep_float64(model.get_base_model())
    mixers = transformers_api.recurrent_modules(model)
    config = CONFIGS[1 + ADAPTED.index(family)]
    wanted = assert_exact(model, config, DOCUMENTS)
    trained = {
        f"{layer}.{factor}.default.weight"
        for layer, module in model.named_modules()
        if any(module is mixer.get_submodule(p) for mixer in mixers for p in PROJECTIONS[family])
        for factor in ("lora_A", "lora_B")
    }
    assert len(trained) == 2 * len(mixers) * len(PROJECTIONS[family])
    assert trained <= wanted.grads.keys()
    assert all(bool(wanted.grads[name].any()) for name in trained)


FROZEN_CONFIGS: dict[str, LongContextConfig] = {
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
        for config in list(FROZEN_CONFIGS)[number % 2 :: 2]
        if each[0] in CHAINED and (each[0], config) != ("lfm2", "heads")  # it has none
    ],
)
def test_few_weights_are_trained(family: str, trained: str, config: str) -> None:
    """Ranks that sent a state waited for its gradient, which others did not come to."""
    model = in_float64(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert assert_exact(model, FROZEN_CONFIGS[config]).grads


@pytest.mark.parametrize(
    ("targets", "config"),
    [("out_proj o_proj", name) for name in FROZEN_CONFIGS]
    + [("in_proj_a in_proj_b", "heads"), ("in_proj_z", "both"), ("up_proj", "both")],
)
def test_adapters_on_some_projections(targets: str, config: str) -> None:
    """The first step's check expected a backward of every exchange, and refused the second step.
    With adapters on MLPs alone the first recurrent layer has none, but is recomputed."""
    adapter = LoraConfig(target_modules=targets.split(), init_lora_weights=False)
    model = get_peft_model(in_float64("qwen3_5_text"), adapter)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert assert_exact(model, FROZEN_CONFIGS[config]).grads


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

    mean = torch.stack(on_ranks(model, FROZEN_CONFIGS["contiguous"], ask)).mean(0)
    assert relative_error(mean, wanted) < TOLERANCE
