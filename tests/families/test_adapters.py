"""Every type of adapter in the list of exact ones gives one process's numbers over two ranks, and
any other is refused, also where it comes after `patch`: Lily and PVeRA were wrong in silence."""

from typing import Any

import peft
import pytest
import torch
from peft import PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from longctx_patch import (
    LongContextConfig,
    PatchHandle,
    UnsupportedModelError,
    patch,
    verify_on_virtual_ranks,
)
from longctx_patch.families.checks import EXACT_ADAPTERS, INEXACT_LORA
from tests.hf.float64 import padded_rows
from tests.hf.steps import on_ranks
from tests.hf.tiny import tiny_model

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "BEFT": {"target_modules": ["v_proj"]},
    "C3A": {"block_size": 32},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": list(range(40))},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 100},
}
LORA: tuple[dict[str, Any], ...] = (
    {"use_dora": True, "use_rslora": True},
    {"lora_bias": True, "bias": "all", "trainable_token_indices": list(range(40))},
    {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    {"target_modules": ["q_proj"], "target_parameters": ["self_attn.v_proj.weight"]},
    {"use_qalora": True, "qalora_group_size": 8},
)


def adapted(model: nn.Module, kind: str, options: dict[str, Any]) -> nn.Module:
    """The model with an adapter that no longer starts with zeros."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[kind]]
    wrapped: nn.Module = get_peft_model(model, config(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize("kind", sorted(EXACT_ADAPTERS & {kind.name for kind in PeftType}))
def test_an_exact_adapter(kind: str) -> None:
    cases: list[dict[str, Any]] = [OPTIONS.get(kind, {})]
    for options in cases + list(LORA) * (kind == "LORA"):
        model = adapted(tiny_model(), kind, TARGETS | options)
        found = verify_on_virtual_ranks(model, LongContextConfig(ring_degree=2), padded_rows())
        # DeLoRA divides by norms of random rows: float32 keeps fewer digits, float64 all of them.
        errors = {"loss": found.loss_rel_err, **found.grad_rel_errs}
        assert max(errors.values()) < (2e-4 if kind == "DELORA" else 1e-5), str(found)
        assert found.traffic_as_planned


def test_an_adapter_that_trains_a_tied_embedding() -> None:
    """PEFT's copy of the head says that it has as many words as the model has hidden numbers."""
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model = adapted(tiny_model(tie_word_embeddings=True), "LORA", TARGETS | options)
    assert model.get_base_model().lm_head.out_features == 64  # type: ignore[operator]
    found = verify_on_virtual_ranks(model, LongContextConfig(ring_degree=2), padded_rows())
    assert found.ok, str(found)


REFUSED: dict[str, dict[str, Any]] = {
    "LILY": TARGETS,
    "PVERA": TARGETS,
    "ADALORA": TARGETS | {"total_step": 10},
    "LORA": TARGETS | {"alora_invocation_tokens": [3, 4]},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_adapter_is_refused_by_name(kind: str) -> None:
    options = REFUSED[kind]
    says = (
        rf"adapter 'default' (is {kind}, .* Use LORA, or one of BEFT|has alora_invocation_tokens)"
    )
    with pytest.raises(UnsupportedModelError, match=says):
        patch(adapted(tiny_model(), kind, options), LongContextConfig())

    def adapt_late(model: Any, _: PatchHandle) -> None:
        late = adapted(model, kind, options)
        with pytest.raises(ValueError, match=says):
            late(**padded_rows())

    on_ranks(tiny_model(), LongContextConfig(ring_degree=2), adapt_late)


def test_options_of_lora_that_are_refused() -> None:
    model = get_peft_model(tiny_model(), peft.LoraConfig(**TARGETS))
    for option in INEXACT_LORA:
        adapter = model.peft_config["default"]
        setattr(adapter, option, "given")
        with pytest.raises(UnsupportedModelError, match=f"has {option}=given: it .* without it"):
            patch(model, LongContextConfig())
        setattr(adapter, option, None)
    patch(model, LongContextConfig())


def test_prompts_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"is PROMPT_TUNING, .* add tokens"):
        patch(get_peft_model(tiny_model(), config), LongContextConfig())
