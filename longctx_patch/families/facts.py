"""Reads facts from a model's config: sizes, kinds of layers, windows, experts.

This needs neither torch nor transformers; any object with a config's attributes will do.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENDING = frozenset({FULL, WINDOWED, CHUNKED, "attention", "hybrid"})
"""Kinds of layers that have attention; `hybrid` has a recurrence beside it."""
DELTA_NET = "linear_attention"
"""What gated delta nets are called; other recurrences have this name in other families."""
RECURRENT = frozenset({DELTA_NET, "mamba", "conv", "hybrid"})
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

COUNTED_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "qwen3_5_moe_text")
"""Families whose experts the planner counts, with the one for all tokens if there is one."""
_VARYING = ("num_kv_shared_layers", "hidden_size_per_layer_input")


class Reach(NamedTuple):
    """Says how far back tokens of a layer see: to their document's start where both are None."""

    window: int | None = None
    """How many keys a token sees at most, its own included."""
    chunk: int | None = None
    """Tokens of the chunks that each document is cut into; a token sees its own chunk."""

    @property
    def is_local(self) -> bool:
        return self != (None, None)


class LayerFacts(NamedTuple):
    """Holds what can differ between the layers of one model."""

    kind: str
    """`full_attention`, `sliding_attention`, or another kind by transformers' name."""
    window: int | None
    """How many keys a token sees at most, its own included; None: all keys up to its own."""
    chunk: int | None
    """Tokens of the chunks that each document is cut into, each of which attends by itself; None:
    documents are whole."""
    rope: Any
    """The layer's entry in `no_rope_layers`, None where the config has none."""
    is_dense: bool
    """Whether its MLP is an ordinary one, without experts and its own."""
    shares_keys: bool
    """Whether its keys and values are those of an earlier layer of its kind."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a causal language model, under one name each, whatever its family calls them."""

    hidden_size: int
    intermediate_size: int
    """Width inside an ordinary MLP; 0 where all layers have experts and the config names none."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a head in attention. In latent attention the larger of a key's and a value's, as
    kernels and messages have one size."""
    rotary_dim: int
    """Numbers of a head that `partial_rotary_factor` is a share of."""
    vocab_size: int
    layers: tuple[LayerFacts, ...]
    softcap: float | None
    """The bound of attention's scores, as in Gemma 2; None: no bound."""
    experts: str | None
    """The option that gives the number of experts, such as `num_experts=8`; None: no experts."""
    are_counted: bool
    """Whether experts are of a kind whose tensors the planner counts, one like the other in every
    layer."""
    latent: str | None
    """The option that makes attention latent (MLA), such as `kv_lora_rank=512`; None: it isn't."""
    latent_dim: int | None
    """Numbers of a token's latent with its rotary part, where they are fewer than those of all
    heads' keys and values."""
    expansion: int | None
    """Weights that turn a token's latent into keys and values of all heads, where there is one."""
    has_delta_nets: bool
    """Whether its recurrent layers are gated delta nets, with one decay for each head."""
    varied: str | None
    """The option that makes layers differ in more than their attention's mask; None: they don't."""

    @classmethod
    def of(cls, config: Any) -> "ModelFacts":
        """The facts of a transformers config; of its text model, where it has several parts."""
        config = text_config(config)
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=_intermediate_size(config),
            num_heads=given(config, "num_attention_heads"),
            num_kv_heads=given(config, "num_key_value_heads")
            or given(config, "num_attention_heads"),
            head_dim=_head_dim(config),
            rotary_dim=_named_head_dim(config),
            vocab_size=config.vocab_size,
            layers=tuple(_layer(config, number) for number in range(config.num_hidden_layers)),
            softcap=given(config, "attn_logit_softcapping"),
            experts=_experts(config),
            are_counted=_are_counted(config),
            latent=f"kv_lora_rank={config.kv_lora_rank}" if is_latent(config) else None,
            latent_dim=_latent_dim(config),
            expansion=_expansion(config),
            has_delta_nets=given(config, "linear_num_value_heads") is not None,
            varied=_varied(config),
        )

    @property
    def unpredicted(self) -> str | None:
        """The option whose time and memory are not predicted, such as `num_experts=8`."""
        experts = None if self.are_counted else self.experts
        return experts or self.latent or self.unmeasured or self.varied

    @property
    def unmeasured(self) -> str | None:
        """Returns what the config calls the first layer that has neither attention alone nor a
        gated delta net: what it takes was never measured."""
        known = (FULL, WINDOWED, CHUNKED, *((DELTA_NET,) if self.has_delta_nets else ()))
        kinds = enumerate(layer.kind for layer in self.layers)
        return next((f"layer {n} is {kind}" for n, kind in kinds if kind not in known), None)

    @property
    def num_recurrent(self) -> int:
        """Counts how many layers have a recurrence or a short convolution along the sequence."""
        return sum(layer.kind in RECURRENT for layer in self.layers)

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer with attention; None where it attends fully."""
        return [layer.window for layer in self.layers if layer.kind in ATTENDING]

    @property
    def reaches(self) -> list[Reach]:
        """Returns how far back each layer with attention sees."""
        return [
            Reach(layer.window, layer.chunk) for layer in self.layers if layer.kind in ATTENDING
        ]

    def reaches_in(self, num_tokens: int) -> list[Reach]:
        """The same, without windows and chunks that a row of `num_tokens` fits into."""
        return [
            Reach(*(size if size and size < num_tokens else None for size in reach))
            for reach in self.reaches
        ]


def text_config(config: Any) -> Any:
    """The config of the text model within the config of a model with several parts."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_latent(config: Any) -> bool:
    """Says whether keys and values are expanded from a latent of each token (MLA)."""
    return bool(given(config, "kv_lora_rank"))


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer; empty where all are alike and the config names none."""
    return tuple(given(config, "layer_types") or ())


def chunks_of(config: Any) -> dict[int, int | None]:
    """Returns the tokens of the chunks in which layers attend, by the layer's number; layers that
    are not in it attend to whole documents."""
    kinds = layer_kinds(config)
    if CHUNKED not in kinds:
        return {}
    chunk: int | None = given(config, "attention_chunk_size")
    return {number: chunk for number, kind in enumerate(kinds) if kind == CHUNKED}


def sees_absolute_positions(config: Any) -> bool:
    """Says whether attention depends on positions, not on distances of tokens alone: Ministral 3
    scales queries by their position, as Beam does in layers without rotary embeddings."""
    rope = given(config, "rope_parameters") or {}
    return "llama_4_scaling_beta" in rope or None in rope.values()


def _layer(config: Any, number: int) -> LayerFacts:
    kinds, rope = layer_kinds(config), given(config, "no_rope_layers")
    window = given(config, "sliding_window") or None
    kind = kinds[number] if kinds else WINDOWED if window else FULL
    return LayerFacts(
        kind=kind,
        window=window if kind == WINDOWED else None,
        chunk=chunks_of(config).get(number),
        rope=rope[number] if rope else None,
        is_dense=_is_dense(config, number),
        shares_keys=number
        >= config.num_hidden_layers - (given(config, "num_kv_shared_layers") or 0),
    )


def _named_head_dim(config: Any) -> int:
    """Returns transformers' `head_dim`; in most latent attention it is the rotary part of a key."""
    return given(config, "head_dim") or int(config.hidden_size // config.num_attention_heads)


def _head_dim(config: Any) -> int:
    if not is_latent(config):
        return _named_head_dim(config)
    key_dim: int = config.qk_nope_head_dim + config.qk_rope_head_dim
    return max(key_dim, config.v_head_dim)


def _latent_dim(config: Any) -> int | None:
    if not is_latent(config):
        return None
    latent_dim: int = config.kv_lora_rank + config.qk_rope_head_dim
    return latent_dim if latent_dim < 2 * config.num_attention_heads * _head_dim(config) else None


def _expansion(config: Any) -> int | None:
    if _latent_dim(config) is None:
        return None
    heads: int = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return heads * int(config.kv_lora_rank)


def _is_dense(config: Any, layer: int) -> bool:
    """Mixtures of experts can have ordinary layers: the first ones, those named, or all but every
    n-th."""
    kinds, sparse = given(config, "mlp_layer_types"), given(config, "moe_layers")
    return (
        # In Zamba 2 layers share their attention and their MLP.
        (_experts(config) is None and not given(config, "num_mem_blocks"))
        or bool(given(config, "enable_moe_block"))  # Gemma 4 has both in each layer
        or layer in (given(config, "mlp_only_layers") or ())
        or (layer + 1) % (given(config, "decoder_sparse_step") or 1) > 0
        or layer < (given(config, "first_k_dense_replace") or 0)
        or layer < (given(config, "num_dense_layers") or 0)
        or layer < (given(config, "moe_layer_start_index") or 0)
        or bool(kinds and kinds[layer] == "dense")
        or (sparse is not None and layer not in sparse)
    )


def _intermediate_size(config: Any) -> int:
    """The largest, where layers differ in it, as in Gemma 3n; four times the hidden size where
    nothing is given, as in GPT-2."""
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner")
    sizes = (given(config, name) for name in names)
    size = next((size for size in sizes if size), 4 * config.hidden_size)
    return max(size) if isinstance(size, list | tuple) else int(size)


def _varied(config: Any) -> str | None:
    if names := getattr(config, "per_layer_attributes", None):
        return f"a {min(names)} for each layer"
    named = ((name, given(config, name)) for name in _VARYING)
    return next((f"{name}={value}" for name, value in named if value), None)


def _experts(config: Any) -> str | None:
    named = ((name, given(config, name)) for name in _EXPERTS)
    return next((f"{name}={number}" for name, number in named if number), None)


def _are_counted(config: Any) -> bool:
    if config.model_type not in COUNTED_EXPERTS:
        return False
    layers, chosen = range(config.num_hidden_layers), config.num_experts_per_tok
    is_possible = 1 <= chosen <= max(given(config, name) or 0 for name in _EXPERTS)
    return is_possible and not any(_is_dense(config, layer) for layer in layers)


def given(config: Any, name: str) -> Any:
    """An option; the largest value where layers differ in it, as in Gemma 4; None: not given."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return max(getattr(layer, name) for layer in config.per_layer_config)
    return getattr(config, name, None)
