"""Has, in one file, all that the patch assumes about transformers' internals.

Used: the public attention and mask registries, the decoder's keyword arguments (which transformers
hands through to every attention function), `loss_function`, and the attributes by which
`GradientCheckpointingLayer` finds its checkpoint function. Checked with 5.17 to 5.24.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from longctx_patch.families.facts import text_config

OLDEST, NEWEST = Version("5.17"), Version("6")

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

# Our name for each stock implementation that it stands in for. The names must not contain "flash",
# "sdpa" or "flex_attention": transformers would take them for its own and check for the packages.
NAME_OVER_STOCK = {
    "eager": "longctx_patch_over_eager",
    "sdpa": "longctx_patch_over_torch",
    "flash_attention_2": "longctx_patch_over_fa2",
    "flash_attention_3": "longctx_patch_over_fa3",
    "flash_attention_4": "longctx_patch_over_fa4",
}

# Options that transformers passes to every attention function but causal attention ignores, besides
# the arguments that the decoder itself reads.
HARMLESS_OPTIONS = frozenset(
    {
        *("logits_to_keep", "output_hidden_states", "output_router_logits", "return_dict"),
        *("shift_labels", "labels", "use_cache"),
    }
)
CACHE_NAMES = ("cache", "past_key_values")
"""What a model calls the argument for a cache: since transformers 5.24, which takes the second name
too, and before."""
DECODER_ARGUMENTS = frozenset(
    {
        *("input_ids", "inputs_embeds", "per_layer_inputs", "attention_mask", "position_ids"),
        *CACHE_NAMES,
    }
)

# Options that decoders and layers add for attention functions but attention ignores.
LAYER_OPTIONS = frozenset({"output_attentions", "cache_position"})

# Functions of transformers' modules by which recurrent layers mix tokens: a short convolution, then
# the scan of a state. Each takes the options that the decoder was called with.
SEQUENCE_FUNCTIONS = frozenset(
    {
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined",
    }
)

_EAGER = "eager_attention_forward"
_EXPAND = "expand_kv"

CALL_KEY = "longctx_call"
"""Keyword argument that carries a sharded call from the decoder to every attention function."""
HAND_ON_MASK_ALONE = frozenset({"nemotron", "persimmon", "stablelm"})
"""Families whose layers hand their attention no further arguments: there the mask carries the call,
and a mask without one means a stock pass."""
WINDOW_IN_MASK_ALONE = frozenset({"phimoe"})
"""Families whose attention modules don't know their window, which is in the decoder's mask."""


def check_version() -> None:
    """Raise ImportError for versions below OLDEST, or from NEWEST on."""
    found = Version(transformers.__version__)
    if not OLDEST <= Version(found.base_version) < NEWEST:
        raise ImportError(
            f"transformers {found} is installed, longctx-patch needs >= {OLDEST}, < {NEWEST}: "
            f"pip install 'transformers>={OLDEST},<{NEWEST}'."
        )


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, also from inside a PEFT wrapper."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"{type(base).__name__} is not a transformers model: patch the model that "
            "AutoModelForCausalLM returns (or a PEFT model around it), before DDP, FSDP or "
            "torch.compile wrap it."
        )
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not any(type(base).__name__ in kind.values() for kind in kinds):
        raise ValueError(
            f"{type(base).__name__} is not a causal language model: other heads pool or compare "
            "tokens that lie on different ranks. Patch the model that AutoModelForCausalLM returns."
        )
    return base


def attention_implementation(model: PreTrainedModel) -> str:
    return str(text_config(model.config)._attn_implementation)


def bind_attention(model: PreTrainedModel, stock: str) -> Callable[[], None]:
    """Switch to our attention; return a function that switches back. What reads images keeps its
    own."""

    def switch(name: str) -> None:
        model.set_attn_implementation({"text_config": name} if reads_images(model) else name)

    switch(NAME_OVER_STOCK[stock])
    return lambda: switch(stock)


def reads_images(model: nn.Module) -> bool:
    """Says whether the text model is one part of several."""
    config = getattr(model, "config", None)
    return config is not None and text_config(config) is not config


def router_weight(model: PreTrainedModel) -> str:
    """The model's attribute that weighs the loss of its router."""
    return "aux_loss_coef" if hasattr(model, "aux_loss_coef") else "router_aux_loss_coef"


def has_own_loss(model: PreTrainedModel) -> bool:
    return "_loss_function" in vars(model)


def bind_loss(model: PreTrainedModel, loss: Callable[..., Tensor]) -> Callable[[], None]:
    """Set the loss function of a model without one of its own; return a function that unsets it."""
    model.loss_function = loss
    return lambda: delattr(model, "_loss_function")


def hook(
    module: nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    also_after_errors: bool = False,
    around: bool = False,
) -> Callable[[], None]:
    """Hook a module's forward with its keyword arguments; return a function that undoes it.

    `around`: `before` runs before the hooks that the module has, not after them.
    """
    hooks = (
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=around),
        module.register_forward_hook(after, with_kwargs=True, always_call=also_after_errors),
    )

    def remove() -> None:
        for registered in hooks:
            registered.remove()

    return remove


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that call the attention registry, but for those of an image encoder."""
    root = decoder_of(model) if reads_images(model) else model
    return [m for m in root.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]


def window_of(module: nn.Module) -> int | None:
    """The sliding window of a module that does not hand one to its attention function."""
    config: Any = module.config
    holder = config if config.model_type in WINDOW_IN_MASK_ALONE else module
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def counting_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that scale queries by a place which they count by themselves, as if their input
    began where a cache ends."""
    modules: list[Any] = attention_modules(model)
    return [m for m in modules if getattr(m, "attn_temperature_tuning", False) and not m.use_rope]


def cache_given(kwargs: Mapping[str, Any]) -> str | None:
    """The name by which arguments hold a cache, None without one."""
    return next((name for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def cache_name(module: nn.Module) -> str:
    """Returns what a module's forward calls its argument for a cache. By the other name
    transformers 5.24 drops it where the caller gives both, though one is None."""
    code = code_of(type(module)).__code__
    taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # no local variables
    return next(name for name in CACHE_NAMES if name in taken)


def bind_latents(model: nn.Module) -> Callable[[], None]:
    """Hand latents to attention functions in place of keys and values; return an undo function.

    transformers' latent attention expands them in `expand_kv`, right before it calls the registry.
    """
    modules = attention_modules(model)
    for module in modules:
        vars(module)[_EXPAND] = _as_they_are

    def restore() -> None:
        for module in modules:
            del vars(module)[_EXPAND]

    return restore


def hands_on_latents(module: nn.Module) -> bool:
    """Says whether attention functions get this layer's latents in place of keys and values."""
    return vars(module).get(_EXPAND) is _as_they_are


def can_hand_on_latents(module: nn.Module) -> bool:
    """Says whether `bind_latents` would know what it replaces in this layer."""
    return hasattr(type(module), _EXPAND) and _EXPAND not in vars(module)


def expand_latents(module: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, M, any]` of latents `[B, 1, M, any]`, as the stock layer makes them,
    with the adapters that it has."""
    keys, values = type(module).expand_kv(module, latent, rotary)
    return keys, values


def expanding_layer(module: nn.Module) -> nn.Module:
    """The part of a layer that has all weights that `expand_latents` uses."""
    return module.get_submodule("kv_b_proj")


def _as_they_are(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rotary


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose class's forward calls one of `SEQUENCE_FUNCTIONS`."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and _calls_one(type(m))]


def mixing_modules(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """All modules in which tokens meet, each with the number of its decoder layer."""
    mixing = {id(m) for m in (*attention_modules(model), *recurrent_modules(model))}
    return [
        (module, number)
        for number, layer in enumerate(decoder_layers(model))
        for module in layer.modules()
        if id(module) in mixing
    ]


def code_of(cls: type[nn.Module]) -> FunctionType:
    """The forward of a class as it is written, without decorators."""
    forward = inspect.unwrap(cls.forward)
    assert isinstance(forward, FunctionType)
    return forward


def takes_options(cls: type[nn.Module]) -> bool:
    """Says whether a forward takes any option, as those that a decoder's call doesn't know."""
    return bool(code_of(cls).__code__.co_flags & inspect.CO_VARKEYWORDS)


def _calls_one(cls: type[nn.Module]) -> bool:
    return not SEQUENCE_FUNCTIONS.isdisjoint(code_of(cls).__code__.co_names)


def register(sharded_attention: AttentionFunction) -> None:
    """Register our attention and mask functions; doing it again changes nothing.

    The functions hold no state: what they do is decided by the call they are handed, so two models
    in one process can be patched differently.
    """
    for stock, name in NAME_OVER_STOCK.items():
        # A compiled layer calls the function untraced: plans, caches and messages can't be traced.
        function = torch.compiler.disable(functools.partial(_dispatch, sharded_attention, stock))
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, functools.partial(_stock_mask, stock))


def _dispatch(
    sharded_attention: AttentionFunction,
    stock: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    config: Any = module.config
    if config.model_type in HAND_ON_MASK_ALONE:
        kwargs = {CALL_KEY: getattr(attention_mask, CALL_KEY, None)} | kwargs
    if CALL_KEY not in kwargs:
        raise RuntimeError(
            f"{type(module).__name__} of a patched model ran without its decoder, so it can't know "
            "whether its input is a shard. Call the model, or handle.unpatch() first. If this is "
            "another model: it shares its config object with a patched one, and transformers keeps "
            "the choice of attention there. Build it from copy.deepcopy(config)."
        )
    call = kwargs.pop(CALL_KEY)
    if call is not None:
        return sharded_attention(module, query, key, value, call=call, **kwargs)
    if hands_on_latents(module):
        key, value = expand_latents(module, key, value)
    # A model's eager function is beside its attention class; under FSDP, beside a base of that.
    homes = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    eager = next((home.eager_attention_forward for home in homes if hasattr(home, _EAGER)), None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
    return function(module, query, key, value, attention_mask, **kwargs)


def _stock_mask(stock: str, *args: Any, **kwargs: Any) -> Any:
    """Called for stock passes only; sharded calls bring a ready-made mask (`no_mask`)."""
    return ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)


def no_mask(call: Any, batch: int, device: torch.device) -> Tensor:
    """Returns what a sharded call passes as attention mask: an empty one, which carries the call.

    transformers returns a 4-D mask untouched. Without one it would read the position ids of a
    shard, take their gaps for packed documents and build a dense mask.
    """
    mask = torch.empty((batch, 1, 0, 0), dtype=torch.bool, device=device)
    setattr(mask, CALL_KEY, call)
    return mask


def decoder_of(model: Any) -> nn.Module:
    """The model without its head. Llama 4 names another attribute as its base than it has, and then
    transformers returns the whole model."""
    found = model.get_decoder()
    decoder: nn.Module = model.model if found is model else found
    return decoder


def decoder_layers(model: Any) -> list[GradientCheckpointingLayer]:
    """The text model's layers that transformers can checkpoint, first to last; one within another,
    as in Zamba 2, is a part of it."""
    text = decoder_of(model) if reads_images(model) else model
    layers = [m for m in text.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def dense_mlps(model: PreTrainedModel) -> list[nn.Module | None]:
    """The MLP of each decoder layer, a function of one token's hidden state; None for experts, and
    where a layer has none or another name for it than most."""
    mlps = (_mlp(layer) for layer in decoder_layers(model))
    return [None if hasattr(mlp, "experts") or hasattr(mlp, "router") else mlp for mlp in mlps]


def _mlp(layer: nn.Module) -> nn.Module | None:
    if getattr(layer, "block_type", None) == "mlp":  # a layer of Nemotron-H is one of several kinds
        return layer.mixer  # type: ignore[return-value]
    return getattr(layer, "mlp", getattr(layer, "feed_forward", None))


def checkpoint_layers(model: PreTrainedModel, run: Callable[..., Any]) -> Callable[[], None]:
    """While training, the forward of decoder layer `i` runs as `run(i, forward, *args)`.

    Neither backward nor a recompute calls `run` again: what `run` does for a layer holds until the
    layer's backward is over. In transformers 5.17 `forward` includes the layer's hooks, from 5.23
    on it does not; from 5.24 on a pass without gradients does not call `run`. Returns a function
    that restores what was there before.
    """
    layers = decoder_layers(model)
    keys = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [{key: vars(layer)[key] for key in keys if key in vars(layer)} for layer in layers]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(run, number)

    def restore() -> None:
        for layer, values in zip(layers, before, strict=True):
            for key in keys:
                vars(layer).pop(key, None)
            vars(layer).update(values)

    return restore


def name_own_blocks(model: PreTrainedModel) -> Callable[[], None]:
    """Leave in `_no_split_modules` what FSDP can shard by itself; return a function that undoes it.

    It refuses a class that it does not find, and text models name blocks of the encoders of the
    models that they are part of; and blocks that share weights, as Zamba 2's do, which stay with
    the rest of the model.
    """
    named = model._no_split_modules
    blocks: dict[str, list[int]] = {}
    for module in model.modules():
        if type(module).__name__ in (named or ()):
            blocks.setdefault(type(module).__name__, []).extend(map(id, module.parameters()))
    model._no_split_modules = {name for name, own in blocks.items() if len(own) == len({*own})}

    def restore() -> None:
        model._no_split_modules = named

    return restore
