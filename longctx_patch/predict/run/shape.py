"""What the planner knows of a model: sizes, from its config alone."""

import copy
from dataclasses import dataclass
from typing import Any

from longctx_patch.hf.model.auto_class import auto_class
from longctx_patch.hf.model.facts import ModelFacts

HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder whose layers are alike. Weights are counted as numbers, not as bytes."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_weights: int
    """All weights of one layer."""
    layer_linear_weights: int
    """Weights of a layer's matrix products."""
    down_weights: int
    """Weights of the MLP's last product, which a recompute leaves out: nobody reads its result."""
    num_mlp_products: int
    """How many matrix products of that size the MLP has: 3 with a gate, 2 without."""
    linear_sides: int
    """Inputs and outputs of a layer's matrix products: the weights of an adapter of rank 1."""
    num_norms: int
    """How many norms over hidden states a layer has."""
    has_head_norms: bool
    """Whether queries and keys are normed."""
    num_weights: int
    """Weights of the model; tied embeddings count once."""
    num_windowed_layers: int = 0
    """How many layers have a window or chunks. They are counted as full causal attention."""

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def linear_weights(self) -> int:
        """Weights of all layers' matrix products and of the head."""
        return self.num_layers * self.layer_linear_weights + self.head_weights

    def step_flops(self, num_tokens: int) -> float:
        """FLOPs of one causal row, forward and backward, without recompute: 6 for each linear
        weight and token, and 6 * num_layers * num_tokens^2 * num_heads * head_dim for attention."""
        attention = self.num_layers * num_tokens**2 * self.num_heads * self.head_dim
        return 6.0 * (self.linear_weights * num_tokens + attention)


def shape_of(config: Any, name: str) -> ModelShape:
    """Read the sizes from a transformers config.

    Raises ValueError for experts, for latent attention, for recurrent layers and where layers have
    other sizes."""
    facts = ModelFacts.of(config)
    if facts.unpredicted:
        why = (
            "dense layers only, since what experts take depends on the router"
            if facts.experts
            else "layers whose keys and values are projected from hidden states, not from a latent"
            if facts.latent
            else "attention, but not the memory of recurrent layers"
            if facts.recurrent
            else "layers that are alike"
        )
        raise ValueError(
            f"model {name}: {facts.unpredicted}. The planner knows {why}. Train a few steps with "
            "checkpoint='auto', which measures."
        )
    layer, num_outside = _one_layer(config)
    # Two dimensions don't tell a linear weight: Cohere's norms of heads have two as well.
    linear = [part.weight for part in layer.modules() if hasattr(part, "in_features")]
    norms = [key for key, part in layer.named_modules() if "norm" in type(part).__name__.lower()]
    head_norms = [key for key in norms if key.endswith(HEAD_NORMS)]
    down_weights, num_layers = facts.hidden_size * facts.intermediate_size, len(facts.layers)
    layer_weights = sum(weight.numel() for weight in layer.parameters())
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        layer_weights=layer_weights,
        layer_linear_weights=sum(weight.numel() for weight in linear),
        down_weights=down_weights,
        num_mlp_products=sum(w.numel() for w in layer.mlp.parameters() if w.ndim == 2)
        // down_weights,
        linear_sides=sum(sum(weight.shape) for weight in linear),
        num_norms=len(norms) - len(head_norms),
        has_head_norms=bool(head_norms),
        num_weights=num_outside + num_layers * layer_weights,
        num_windowed_layers=sum(reach.is_local for reach in facts.reaches),
    )


def _one_layer(config: Any) -> tuple[Any, int]:
    """(a decoder layer on the meta device, how many weights there are outside of layers)."""
    import torch

    short = copy.deepcopy(config)
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:1]
    short.num_hidden_layers = 1
    with torch.device("meta"):
        model = auto_class(short).from_config(short)
    (layer,) = model.get_decoder().layers
    total = sum(weight.numel() for weight in model.parameters())
    return layer, total - sum(weight.numel() for weight in layer.parameters())
