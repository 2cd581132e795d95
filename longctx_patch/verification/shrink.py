"""A small model that keeps all features of a large one that matter for cutting its sequence.

Kept: family, number of query and key-value heads, RoPE settings, norms, biases, tied embeddings,
each kind of layer in the model's order, softcap, sinks, routing to experts, shared experts.
Made small: layers (two or more, so that gradients cross one attention into another), vocabulary,
widths, experts, and the sliding window (so that it matters in short rows).
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longctx_patch.families.facts import FULL, LayerFacts, ModelFacts
from longctx_patch.families.text_part import auto_class
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import run_torch_recurrences

NUM_LAYERS = 2
VOCAB_SIZE = 251
HIDDEN_SIZE = 48
HEAD_DIM = 8
WINDOW = 23
"""An odd window, less than a rank's share of the tokens that are verified."""
SOFTCAP = 5.0
"""A softcap low enough to bend the scores of small heads."""
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
}
PER_LAYER = (
    *("layer_types", "layers_block_type", "mlp_layer_types"),
    *("no_rope_layers", "layer_rope_theta"),
    *("num_attention_heads_per_layer", "activation_sparsity_pattern"),
)
"""Options that have an entry for each layer."""
DENSE_AT_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Options that count the layers before the first with experts."""
LATENT_RANKS = {"kv_lora_rank": 20, "q_lora_rank": 28}
LATENT_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
WIDTHS = {
    "intermediate_size": 56,
    "intermediate_size_mlp": 56,
    "moe_intermediate_size": 24,
    "laurel_rank": 8,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
}
RECURRENT = {
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": 12,
    "linear_head_dim": HEAD_DIM,
    "mamba_n_heads": 6,
    "mamba_num_heads": 6,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_d_state": 12,
    "ssm_state_size": 12,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
}
"""Sizes of recurrent layers; those of Mamba-2 must add up to twice the hidden size."""
GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
WIDE_AS_HEADS = ("bitnet", "gpt_neox", "helium", "olmoe", "persimmon", "stablelm")
"""Families whose output projection or norms need heads * head_dim to be the hidden size."""
SPREAD = 0.15
"""Standard deviation of the weights, large enough that attention is far from uniform."""


def shrink_config(model_config: Any) -> Any:
    """A shrunken copy of a transformers config that has passed `check_model_config`."""
    small, facts = copy.deepcopy(model_config), ModelFacts.of(model_config)
    varied = _options_by_layer(small, facts.layers)
    _keep_layers(small, facts.layers)
    _keep_score_scale(small, facts.head_dim)
    as_wide = model_config.model_type in WIDE_AS_HEADS
    small.hidden_size = small.num_attention_heads * HEAD_DIM if as_wide else HIDDEN_SIZE
    for name, width in (WIDTHS | RECURRENT).items():
        if name == "head_dim" or getattr(small, name, None):
            by_layer = isinstance(getattr(small, name, None), list | tuple)  # as in Gemma 3n
            setattr(small, name, [width] * small.num_hidden_layers if by_layer else width)
    for name in GROUPS:
        _lower(small, name, 2)
    if facts.latent:
        _shrink_latent(small, model_config)
    if getattr(small, "num_mem_blocks", None):
        _shrink_shared(small)
    _lower(small, "sliding_window", WINDOW)
    _lower(small, "attention_chunk_size", WINDOW)
    _lower(small, "floor_scale", WINDOW)
    _lower(small, "attn_logit_softcapping", SOFTCAP)
    for name, number in EXPERTS.items():
        _lower(small, name, number)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # The ids of the large vocabulary are not in the small one; some classes want a number.
        vars(small)[name] = None
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    if varied:
        small.per_layer_config = varied
    return small


def _chosen_layers(layers: Sequence[LayerFacts]) -> list[int]:
    """The first layer of each kind, and one more layer if there is only one kind."""
    firsts = sorted({layer: layers.index(layer) for layer in layers}.values())
    others = [number for number in range(len(layers)) if number not in firsts]
    return sorted(firsts + others[: max(0, NUM_LAYERS - len(firsts))])


def _options_by_layer(small: Any, layers: Sequence[LayerFacts]) -> dict[int, dict[str, Any]]:
    """Take out the options in which layers differ; return those of the layers that are kept. Sizes
    of heads become small, in proportion."""
    names = getattr(small, "per_layer_attributes", None)
    if not names:
        return {}
    kept = [small.per_layer_config[layer] for layer in _chosen_layers(layers)]
    found = {new: {name: getattr(old, name) for name in names} for new, old in enumerate(kept)}
    small.per_layer_config = None
    for options in found.values():
        if "head_dim" in options:
            options["head_dim"] = options["head_dim"] * HEAD_DIM // small.head_dim
    return found


def _keep_layers(small: Any, layers: Sequence[LayerFacts]) -> None:
    """Keep some of the model's layers; a model of one layer gets a second one like it."""
    chosen = _chosen_layers(layers)
    dense = [new for new, old in enumerate(chosen) if layers[old].is_dense]
    chosen = chosen * NUM_LAYERS if len(chosen) == 1 else chosen
    vars(small)["num_hidden_layers"] = len(chosen)
    for name in PER_LAYER:
        if values := vars(small).get(name):  # other configs make theirs from other options
            vars(small)[name] = [values[layer] for layer in chosen]
    if hasattr(small, "attn_layer_indices"):
        full = [new for new, old in enumerate(chosen) if layers[old].kind == FULL]
        small.attn_layer_indices = full
    if hasattr(small, "mlp_only_layers"):
        small.mlp_only_layers, small.decoder_sparse_step = dense, 1
    if getattr(small, "num_kv_shared_layers", 0):
        small.num_kv_shared_layers = sum(layers[layer].shares_keys for layer in chosen)
    if hasattr(small, "moe_layers"):
        small.moe_layers = [new for new in range(len(chosen)) if new not in dense]
    for name in DENSE_AT_FIRST:
        if hasattr(small, name):
            setattr(small, name, len(dense))


def _shrink_latent(small: Any, large: Any) -> None:
    """Shrink latent attention, with the sizes of its heads in proportion to `head_dim`."""
    for name in LATENT_DIMS:
        setattr(small, name, getattr(large, name) * HEAD_DIM // large.head_dim)
    small.qk_head_dim = small.qk_nope_head_dim + small.qk_rope_head_dim
    for name, rank in LATENT_RANKS.items():
        _lower(small, name, rank)


def _shrink_shared(small: Any) -> None:
    """Shrink the blocks that layers of Zamba 2 share: their attention has twice the hidden size,
    and its config computes several sizes only when it is made."""
    small.hidden_size = small.num_attention_heads * HEAD_DIM // 2
    small.attention_hidden_size = 2 * small.hidden_size
    small.n_mamba_heads = small.num_attention_heads
    small.mamba_headdim = small.mamba_expand * small.hidden_size // small.n_mamba_heads
    small.hybrid_layer_ids = [n for n, kind in enumerate(small.layer_types) if kind == "hybrid"]
    _lower(small, "adapter_rank", 8)


def _keep_score_scale(small: Any, head_dim: int) -> None:
    """Keep the ratio of the model's own score scale, if it has one, to `head_dim ** -0.5`."""
    if getattr(small, "query_pre_attn_scalar", None) is not None:
        small.query_pre_attn_scalar = round(small.query_pre_attn_scalar * HEAD_DIM / head_dim)
    if getattr(small, "attention_multiplier", None) is not None:
        small.attention_multiplier *= (head_dim / HEAD_DIM) ** 0.5


def _lower(small: Any, name: str, value: float) -> None:
    """Lower an option to at most `value`; one that is off (None or 0) stays off."""
    if found := getattr(small, name, None):
        setattr(small, name, min(found, value))


def build_small_model(
    small_config: Any, dtype: torch.dtype, *, attn_implementation: str = "eager"
) -> Any:
    """The model on CPU in training mode, with stock attention and weights from a fixed seed, and
    with transformers' torch functions in recurrent layers.

    Every weight is drawn, even norms, biases and sinks, which are 1 or 0 in a fresh model, so that
    no gradient is trivially right. In float64 nothing rounds to float32.
    """
    model = auto_class(small_config).from_config(
        small_config, dtype=dtype, attn_implementation=attn_implementation
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if bool((parameter == 1).all()) else 0.0  # norms; Gemma's are around 0
            parameter.copy_(SPREAD * noise + centre)
    run_torch_recurrences(model)
    if dtype == torch.float64:
        keep_float64(model)
    return model.train()


def keep_float64(model: Any) -> None:
    """Let a float64 model compute in float64 throughout.

    transformers' norms, eager softmax, routers and some rotary embeddings round to float32
    whatever the dtype is. That would hide errors below 1e-8 and, as each rank's loss carries the
    factor W of the loss law, round gradients differently from one process wherever W is not a
    power of two.
    """
    for parameter in model.parameters():  # not buffers: rotary embeddings compute in float32
        parameter.data = parameter.data.double()
    if ModelFacts.of(model.config).experts:
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    parents = [transformers_api.decoder_of(model), *transformers_api.decoder_layers(model)]
    for module in (model, *(child for parent in parents for child in parent.children())):
        # Not the layers themselves: recomputing one for its gradient starts inside its forward.
        if not isinstance(module, nn.ModuleList):
            transformers_api.hook(module, _enter, _leave, also_after_errors=True)
    for layer in transformers_api.decoder_layers(model):
        if altup := getattr(layer, "altup", None):  # Gemma 3n calls two methods of it
            altup.predict = functools.partial(_in_float64, altup.predict)
            altup.correct = functools.partial(_in_float64, altup.correct)
    for module in model.modules():  # Gemma 4's pooler of patches makes weights of whole numbers
        if pool := getattr(module, "_avg_pool_by_positions", None):
            module._avg_pool_by_positions = functools.partial(_with_whole_numbers, pool)


def _in_float64(method: Callable[..., Any], *args: Any) -> Any:
    with _WithoutFloat32():
        return method(*args)


def _with_whole_numbers(method: Callable[..., Any], *args: Any) -> Any:
    with _WholeNumbersToo():
        return method(*args)


def _enter(*_: Any) -> None:
    _WithoutFloat32().__enter__()


def _leave(*_: Any) -> None:
    _WithoutFloat32().__exit__(None, None, None)  # takes off the mode that was entered last


class _WithoutFloat32(TorchFunctionMode):
    """Operations that would cast a float64 tensor to float32 leave it in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


class _WholeNumbersToo(_WithoutFloat32):
    """Turns whole numbers into float64 as well."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        return super().__torch_function__(func, types, args, kwargs)
