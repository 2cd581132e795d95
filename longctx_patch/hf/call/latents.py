"""Latent attention (MLA) in a patched model: whether latents travel, and how they are expanded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.config import LongContextConfig
from longctx_patch.engine.key_form import Expansion
from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf.model import transformers_api


def bind_latents(model: PreTrainedModel, config: LongContextConfig) -> Callable[[], None]:
    """Let latents travel where the config says so; return a function that undoes it.

    Raises UnsupportedModelError where they must travel but can't.
    """
    why = heads_travel_because(model, config)
    if why is None:
        return transformers_api.bind_latents(model)
    if config.kv_exchange == "latent":
        raise UnsupportedModelError(f"kv_exchange='latent': {why}. Use kv_exchange='auto'.")
    return lambda: None


def heads_travel_because(model: PreTrainedModel, config: LongContextConfig) -> str | None:
    """Says why latents don't travel, in words; None: they do. The same on every rank."""
    model_config: Any = model.config
    facts = ModelFacts.of(model_config)
    if config.kv_exchange == "heads":
        return "kv_exchange='heads'"
    if facts.latent is None:
        return f"model type {model_config.model_type!r} has no latents"
    if (why := config.heads_travel_because()) is not None:
        return why
    if config.kv_exchange == "auto" and facts.latent_dim is None:
        return f"{facts.latent}: heads have no more numbers"
    modules = transformers_api.attention_modules(model)
    if not all(map(transformers_api.can_hand_on_latents, modules)):
        return "layers have another expand_kv than transformers' own"
    if any(_draws(transformers_api.expanding_layer(module)) for module in modules):
        return "an adapter on kv_b_proj has dropout"
    return None


def expansion_of(module: nn.Module, query: Tensor) -> Expansion | None:
    """Returns how latents become keys and values; None where attention has got these already."""
    if not transformers_api.hands_on_latents(module):
        return None
    layer = transformers_api.expanding_layer(module)
    weights = tuple(weight for weight in layer.parameters() if weight.requires_grad)
    _check_repeatable(module, layer, weights)
    device = query.device.type
    is_mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def expand(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype, enabled=is_mixed):
            keys, values = transformers_api.expand_latents(
                module, latent.transpose(1, 2), rotary.transpose(1, 2)
            )
        return keys.transpose(1, 2), values.transpose(1, 2)

    return Expansion(expand, weights, int(module.v_head_dim))  # type: ignore[arg-type]


def _check_repeatable(module: nn.Module, layer: nn.Module, weights: tuple[Tensor, ...]) -> None:
    """Refuse what would differ between the tiles of a layer, or count once for each."""
    why = None
    if _draws(layer):
        why = "an adapter on it has dropout, which backward would draw anew: set lora_dropout=0"
    elif any(getattr(weight, "_backward_hooks", None) for weight in weights):
        why = "a hook on one of its weights would run for each block: remove it"
    if why is not None:
        raise ValueError(
            f"kv_b_proj of layer {getattr(module, 'layer_idx', '?')} expands latents in blocks, in "
            f"forward and again in backward; {why}, or use kv_exchange='heads'."
        )


def _draws(layer: nn.Module) -> bool:
    """Says whether a layer has dropout."""
    found = (
        part for part in layer.modules() if isinstance(part, torch.nn.modules.dropout._DropoutNd)
    )
    return any(part.p > 0 for part in found)
