"""Reads what the planner knows of a model, sizes, from its config alone.

A model is a row of layers of one or two kinds: those with attention, and gated delta nets. Layers
of a kind have equal sizes.
"""

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longctx_patch.families.facts import COUNTED_EXPERTS, RECURRENT, ModelFacts, text_config
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.families.text_part import auto_class
from longctx_patch.plans.recurrent import RecurrentShape

HEAD_NORMS = ("q_norm", "k_norm")
WIDE_ROUTERS = ("mixtral",)
"""Families whose routers weigh experts' results in float32."""
FUSED_IN_FILES = ("qwen3_5_moe_text",)
"""Families whose checkpoints have all experts of a layer in one tensor. PEFT's `all-linear` takes
experts that files have as linear modules, with the router, and leaves out these."""
WIDE_NORMS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with recurrent layers whose stock norms multiply by their weight in float32."""


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer: gate, up and down projection of each."""

    num_experts: int
    num_chosen: int
    """How many of them a token goes through."""
    width: int
    """Numbers of a token inside of one."""
    has_wide_weights: bool = False
    """Whether the router's weights, and with them what they weigh, are float32."""
    shared_width: int = 0
    """Numbers of a token inside of the expert that all tokens go through, whose result a gate
    weighs; 0: there is none."""
    gate_up_ranks: int = 2
    """How many times an adapter's rank gate and up, one tensor, have together: 2 where PEFT's
    `all-linear` finds experts and their router, 1 where this tensor is named, 0 if it is frozen."""
    down_ranks: int = 1
    """The same of down."""

    @property
    def idle_share(self) -> float:
        """The share of experts, and of their weights, that a token does not go through."""
        return 1 - self.num_chosen / self.num_experts


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decoder layer. Weights are counted as numbers, not as bytes."""

    weights: int
    """All weights."""
    linear_weights: int
    """Weights of matrix products, those of all experts included."""
    linear_sides: int
    """Inputs and outputs of the matrix products that an adapter on all linear layers is on: its
    weights, if its rank is 1."""
    expert_weights: int = 0
    """Weights of all experts, among the linear ones."""
    expert_sides: int = 0
    """Those of all experts' products, if the adapter is on them; those of gate and up, one product,
    as many times as its adapter has the rank."""
    experts: ExpertShape | None = None
    """None: it has an ordinary MLP."""
    num_norms: int
    """How many norms over hidden states it has."""
    has_head_norms: bool = False
    """Whether queries and keys are normed."""
    has_gate: bool = False
    """Whether attention's output is multiplied by a gate, which the product of the queries gives
    too."""
    has_wide_norms: bool = False
    """Whether norms without Liger Kernel's operators keep their output in float32."""
    recurrence: RecurrentShape | None = None
    """What it has in place of attention; None: it has attention."""

    @property
    def dense_weights(self) -> int:
        """Weights of the matrix products that are no experts'."""
        return self.linear_weights - self.expert_weights

    @property
    def active_weights(self) -> float:
        """Weights of the matrix products that a token goes through."""
        return self.linear_weights - self._idle * self.expert_weights

    @property
    def active_sides(self) -> float:
        """Inputs and outputs of these products."""
        return self.linear_sides - self._idle * self.expert_sides

    @property
    def _idle(self) -> float:
        return 0.0 if self.experts is None else self.experts.idle_share


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder. Weights are counted as numbers, not as bytes."""

    name: str
    layers: tuple[LayerShape, ...]
    """First to last."""
    hidden_size: int
    intermediate_size: int
    """Numbers of a token inside of an ordinary MLP; 0 where layers have experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    down_weights: int
    """Weights of the MLP's last product, which a recompute leaves out: nobody reads its result."""
    num_mlp_products: int
    """How many matrix products of that size the MLP has: 3 with a gate, 2 without; experts: 0."""
    num_weights: int
    """Weights of the model; tied embeddings count once."""
    num_windowed_layers: int = 0
    """How many layers have a window or chunks. They are counted as full causal attention."""

    @cached_property
    def kinds(self) -> Mapping[LayerShape, int]:
        """Counts how many layers there are of each kind."""
        return Counter(self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_recurrent(self) -> int:
        """Counts how many layers have a recurrence in place of attention."""
        return sum(number for kind, number in self.kinds.items() if kind.recurrence is not None)

    @property
    def num_attending(self) -> int:
        return self.num_layers - self.num_recurrent

    @property
    def recurrence(self) -> RecurrentShape | None:
        """The shape of the recurrent layers; None where no layer is recurrent."""
        return next((kind.recurrence for kind in self.kinds if kind.recurrence is not None), None)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def is_tied(self) -> bool:
        """Says whether embeddings and head share their weights."""
        return self.num_weights - self.weights_in_layers < 2 * self.head_weights

    @property
    def norm_weights(self) -> int:
        """Weights of the norms over hidden states."""
        inside = sum(number * kind.num_norms for kind, number in self.kinds.items())
        return (inside + 1) * self.hidden_size

    @property
    def weights_in_layers(self) -> int:
        """All weights of all layers."""
        return sum(number * kind.weights for kind, number in self.kinds.items())

    @property
    def linear_weights_in_layers(self) -> int:
        """Weights of all layers' matrix products."""
        return sum(number * kind.linear_weights for kind, number in self.kinds.items())

    @property
    def dense_weights_in_layers(self) -> int:
        """Weights of all layers' matrix products that are no experts'."""
        return sum(number * kind.dense_weights for kind, number in self.kinds.items())

    @property
    def active_weights_in_layers(self) -> float:
        """Weights of all layers' matrix products that a token goes through."""
        return sum(number * kind.active_weights for kind, number in self.kinds.items())

    @property
    def linear_sides(self) -> int:
        """The weights of an adapter of rank 1 beside every matrix product of the layers."""
        return sum(number * kind.linear_sides for kind, number in self.kinds.items())

    @property
    def active_weights(self) -> float:
        """Weights of all layers' matrix products that a token goes through, and of the head."""
        return self.active_weights_in_layers + self.head_weights

    def step_flops(self, num_tokens: int) -> float:
        """FLOPs of one causal row, forward and backward, without recompute: 6 for each active
        weight and token, 6 * num_tokens^2 * num_heads * head_dim for each layer with attention, and
        for each recurrence three times those of its chunked forward."""
        attention = self.num_attending * num_tokens**2 * self.num_heads * self.head_dim
        flops = 6.0 * (self.active_weights * num_tokens + attention)
        if (recurrence := self.recurrence) is not None:
            flops += 3.0 * self.num_recurrent * num_tokens * recurrence.run_flops
        return flops


def shape_of(config: Any, name: str, *, lora_parameters: Collection[str] = ()) -> ModelShape:
    """Read the sizes from a transformers config.

    Args:
        lora_parameters: weights that an adapter names beside all linear layers, by the ends of
            their names (PEFT's target_parameters); those of experts count.

    Raises ValueError for experts that aren't counted, for latent attention, for recurrent layers
    that aren't gated delta nets, and where layers have other sizes."""
    facts, recurrent = ModelFacts.of(config), recurrent_layers(config)
    recurrence = None if recurrent is None else recurrent.recurrence
    if facts.unpredicted:
        kind = "short convolutions" if recurrence is None else recurrence.kind
        raise ValueError(
            f"model {name}: {facts.unpredicted}. The planner knows "
            f"{_known_instead_of(facts, kind)}. Train a few steps with checkpoint='auto', which "
            "measures."
        )
    found, num_outside = _layer_of_each_kind(config)
    experts = _experts_of(config, next(iter(found.values())), lora_parameters)
    wide = text_config(config).model_type in WIDE_NORMS
    shapes = {
        is_recurrent: _shape_of_layer(
            layer, facts, recurrence if is_recurrent else None, wide, experts
        )
        for is_recurrent, layer in found.items()
    }
    layers = tuple(shapes[layer.kind in RECURRENT] for layer in facts.layers)
    inner = 0 if experts is not None else facts.intermediate_size
    down_weights, mlp = facts.hidden_size * inner, next(iter(found.values())).mlp
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=facts.hidden_size,
        intermediate_size=inner,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        down_weights=down_weights,
        num_mlp_products=0
        if experts is not None
        else sum(w.numel() for w in mlp.parameters() if w.ndim == 2) // down_weights,
        num_weights=num_outside + sum(layer.weights for layer in layers),
        num_windowed_layers=sum(reach.is_local for reach in facts.reaches),
    )


def _known_instead_of(facts: ModelFacts, recurrent_kind: str) -> str:
    """Names what the planner knows in place of what the refused model has."""
    if facts.experts and not facts.are_counted:
        return f"dense layers, and experts of {', '.join(COUNTED_EXPERTS)} if all layers have them"
    if facts.latent:
        return "layers whose keys and values are projected from hidden states, not from a latent"
    if facts.unmeasured:
        return f"attention and gated delta nets; layers of {recurrent_kind} were never measured"
    return "layers that are alike"


def _experts_of(config: Any, layer: Any, named: Collection[str]) -> ExpertShape | None:
    if not ModelFacts.of(config).are_counted:
        return None
    config = text_config(config)
    num_experts, _, width = layer.mlp.experts.down_proj.shape
    shared = getattr(layer.mlp, "shared_expert", None)
    is_fused = config.model_type in FUSED_IN_FILES
    return ExpertShape(
        num_experts=num_experts,
        num_chosen=config.num_experts_per_tok,
        width=width,
        has_wide_weights=config.model_type in WIDE_ROUTERS,
        shared_width=0 if shared is None else shared.down_proj.in_features,
        gate_up_ranks=int(_is_named("gate_up_proj", named)) if is_fused else 2,
        down_ranks=int(_is_named("down_proj", named)) if is_fused else 1,
    )


def _is_named(weight: str, named: Collection[str]) -> bool:
    """Says whether a weight of experts is one of those, as PEFT finds them."""
    return any(f".layers.0.mlp.experts.{weight}".endswith(f".{name}") for name in named)


def _shape_of_layer(
    layer: Any,
    facts: ModelFacts,
    recurrence: RecurrentShape | None,
    wide: bool,
    experts: ExpertShape | None,
) -> LayerShape:
    # Two dimensions don't tell a linear weight: Cohere's norms of heads have two as well.
    linear = [part.weight for part in layer.modules() if hasattr(part, "in_features")]
    sides = sum(sum(weight.shape) for weight in linear)
    expert_weights = expert_sides = 0
    if experts is not None:
        router = layer.mlp.gate.weight
        linear.append(router)
        gate_up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        expert_weights = gate_up.numel() + down.numel()
        sides_of_one = experts.gate_up_ranks * sum(gate_up.shape[1:])
        sides_of_one += experts.down_ranks * sum(down.shape[1:])
        expert_sides = len(down) * sides_of_one
        sides += expert_sides + (sum(router.shape) if experts.gate_up_ranks > 1 else 0)
    named = layer.named_modules()
    norms = [key for key, part in named if "norm" in type(part).__name__.lower()]
    head_norms = [key for key in norms if key.endswith(HEAD_NORMS)]
    if recurrence is not None:  # the norm of its output is the mixer's own
        norms = [key for key in norms if "." not in key]
    query = getattr(getattr(layer, "self_attn", None), "q_proj", None)
    return LayerShape(
        weights=sum(weight.numel() for weight in layer.parameters()),
        linear_weights=sum(weight.numel() for weight in linear) + expert_weights,
        linear_sides=sides,
        expert_weights=expert_weights,
        expert_sides=expert_sides,
        experts=experts,
        num_norms=len(norms) - len(head_norms),
        has_head_norms=bool(head_norms),
        has_gate=query is not None
        and query.weight.shape[0] == 2 * facts.num_heads * facts.head_dim,
        has_wide_norms=wide,
        recurrence=recurrence,
    )


def _layer_of_each_kind(config: Any) -> tuple[dict[bool, Any], int]:
    """(decoder layers on the meta device, by whether they are recurrent; how many weights there are
    outside of layers)."""
    import torch

    kinds = [layer.kind for layer in ModelFacts.of(config).layers]
    first = {kind in RECURRENT: kind for kind in reversed(kinds)}
    short = copy.deepcopy(config)
    if getattr(short, "layer_types", None):
        short.layer_types = list(first.values())
    short.num_hidden_layers = len(first)
    with torch.device("meta"):
        model = auto_class(short).from_config(short)
    layers = list(model.get_decoder().layers)
    total = sum(weight.numel() for weight in model.parameters())
    inside = sum(weight.numel() for layer in layers for weight in layer.parameters())
    return dict(zip(first, layers, strict=True)), total - inside
