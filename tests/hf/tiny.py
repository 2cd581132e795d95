"""Tiny models of every family, from configs, with two layers and four query heads."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 97

_EXTRA: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}


def tiny_config(family: str, **overrides: Any) -> Any:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "attn_implementation": "sdpa",
    }
    return AutoConfig.for_model(family, **(values | _EXTRA.get(family, {}) | overrides))


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """The same weights wherever it is called, in training mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
    if dtype == torch.float64:
        _keep_norms_in_float64(model)
    return model.train()


def _keep_norms_in_float64(model: PreTrainedModel) -> None:
    """transformers' RMSNorm rounds to float32 inside, which turns a last-bit difference of its
    float64 input into one of 1e-8 now and then. Both sides of a comparison get this one."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                variance = x.pow(2).mean(-1, keepdim=True)
                return norm.weight * x * torch.rsqrt(variance + norm.variance_epsilon)

            module.forward = forward


def token_rows(length: int, num_rows: int = 2, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (num_rows, length), generator=generator)
    return [{"input_ids": row} for row in rows.tolist()]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradient_norm(grads: dict[str, Tensor]) -> Tensor:
    return torch.stack([grad.double().norm() for grad in grads.values()]).norm()
