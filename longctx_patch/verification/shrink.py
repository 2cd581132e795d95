"""A small model that has everything of a large one that matters for cutting its sequence.

Kept: family, number of query and key-value heads, RoPE settings, norms, biases, tied embeddings.
Made small: layers (two, so that gradients cross one attention into another), vocabulary, widths.
"""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 2
VOCAB_SIZE = 251
HIDDEN_SIZE = 48
INTERMEDIATE_SIZE = 56
HEAD_DIM = 8
SPREAD = 0.15
"""Standard deviation of the weights: large enough for attention that is far from uniform."""


def shrink_config(model_config: Any) -> Any:
    """A shrunken copy of a transformers config that has passed `check_model_config`."""
    small = copy.deepcopy(model_config)
    small.num_hidden_layers = NUM_LAYERS
    small.vocab_size = VOCAB_SIZE
    small.hidden_size = HIDDEN_SIZE
    small.intermediate_size = INTERMEDIATE_SIZE
    small.head_dim = HEAD_DIM
    if getattr(small, "layer_types", None) is not None:
        small.layer_types = ["full_attention"] * NUM_LAYERS
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(small, name, None)  # the ids of the large vocabulary are not in the small one
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    return small


def build_small_model(small_config: Any, dtype: torch.dtype) -> Any:
    """The model on CPU in training mode, with stock attention and weights that a seed decides.

    Every weight is drawn, also norms and biases that a fresh model has at 1 and 0, so that no
    gradient is trivially right.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(small_config, dtype=dtype, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(SPREAD * noise + (1.0 if is_norm else 0.0))
    if dtype == torch.float64:
        _norms_in_float64(model)
    return model.train()


def _norms_in_float64(model: nn.Module) -> None:
    """Let norms compute in the model's dtype.

    transformers' norms round to float32 whatever the dtype is. That would hide errors below 1e-8
    and, as each rank's loss carries the factor W of the loss law, round gradients differently
    from one process wherever W is not a power of two.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_rms_norm, module)


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    weight = module.weight
    return nn.functional.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)
