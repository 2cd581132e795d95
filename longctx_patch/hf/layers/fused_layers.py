"""RMSNorm, rotary embedding and SwiGLU of a model's layers in few kernels instead of many.

There are two ways. Each works before or after `patch`, and `unpatch` does not undo it:

- `liger`: Liger Kernel (Hsu et al. 2024), through transformers' own integration. On NVIDIA GPUs,
  for the families in `LIGER_FAMILIES`. It has no rotary embedding for some of them, and the loss
  and, in families with experts, all MLPs stay those of the patched model.
- `compile`: torch.compile for each part of a decoder layer, anywhere and for every family. It does
  not compile the layer as a whole, since nothing is compiled around a recompute.

    from longctx_patch.hf.layers.fused_layers import choose_fused_layers, fuse_layers

    fuse_layers(model, choose_fused_layers("auto", model, "cuda").how)

Results equal those of the stock layers up to rounding.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.family import EXPERTS, ROUTER
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.layers.mlp_tiles import without_tiles
from longctx_patch.hf.model import transformers_api
from longctx_patch.kernels.installed import Package, runs_triton
from longctx_patch.rules.names import require_choice

FusedLayersName = Literal["auto", "liger", "compile", "none"]

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
LIGER_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3"), _SILU),
    **dict.fromkeys(("qwen3_moe", "gpt_oss", "phi3", "olmo2", "olmo3"), _SILU),
    **dict.fromkeys(("smollm3", "granite", "glm4", "exaone4"), _SILU),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _SILU),
    **dict.fromkeys(("deepseek_v3", "falcon_h1", "hunyuan_v1_dense"), _SILU),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), _GELU),
}
"""Families that Liger Kernel 0.8.5 has kernels for, and the activations that these kernels compute,
whatever the model's config says."""

_ROPE = "apply_rotary_pos_emb"
_ACTIVATIONS = ("act_fn", "activation_fn")
_LIGER_CHOICES = (
    "LIGER_KERNEL_IMPL_ROPE",
    "LIGER_KERNEL_BACKEND_ROPE",
    "LIGER_KERNEL_IMPL",
    "LIGER_KERNEL_BACKEND",
)
"""Variables that choose the implementation of Liger's rotary embedding; the first overrides the
others."""
_TRITON = "nvidia-triton"
"""With CUTLASS's DSL installed, which flash-attn 4 brings along, Liger Kernel 0.8.5 would take a
rotary embedding that keeps the cos and sin of up to eight steps, 4 KiB a token of 128-wide heads.
By Liger's own figures it is as fast as Triton's on H200."""
LIGER = Package(
    distribution="liger-kernel",
    module="liger_kernel.transformers",
    least="0.8.5",  # older ones rotate Phi-3 wrongly, and fuse less
    install="pip install 'liger-kernel>=0.8.5'",
)


class FusedLayers(NamedTuple):
    """Says what `fuse_layers` is to do."""

    how: FusedLayersName
    why: str


def choose_fused_layers(how: FusedLayersName, model: nn.Module, device_type: str) -> FusedLayers:
    """Resolve `auto`: `liger` if the model will run on `cuda` and Liger Kernel can serve it.

    Otherwise it is `none`, and `why` says what is missing. It is never `compile`, whose first step
    takes minutes. Any other `how` is returned as it is. Nothing is changed.
    """
    if how != "auto":
        return FusedLayers(how, "as asked for")
    problem = _lacks_liger(device_type) or _not_served(transformers_api.causal_lm(model))
    if problem is not None:
        return FusedLayers("none", problem)
    return FusedLayers("liger", "what Liger Kernel has for the family")


def require_fused_layers(how: FusedLayersName, device_type: str) -> None:
    """Raise ValueError if `how` can't be had for any model, before one is built."""
    if how == "liger" and (problem := _lacks_liger(device_type)) is not None:
        raise ValueError(f"fused_layers='liger': {problem}. Or use 'compile', 'auto' or 'none'.")


def _lacks_liger(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"Liger Kernel has no kernels for device {device_type}"
    if not runs_triton():
        return "Liger Kernel needs Triton, which does not run on this machine"
    return LIGER.problem()


def fuse_layers(model: nn.Module, how: FusedLayersName) -> None:
    """Change the decoder layers of one model in place; weights keep their names.

    Args:
        model: a causal language model of transformers, or a PEFT model around one, before DDP or
            FSDP wrap it. Patched or not.
        how: `liger`, `compile` or `none`, which changes nothing. `choose_fused_layers` says which
            for `auto`.

    `liger` gives the model's RMSNorm and MLP modules a forward of their own. The rotary embedding
    is one function for a whole family in transformers: on CUDA, *every* model of that family in
    this process uses Liger's from then on, where there is one, with the same numbers to within
    rounding. It can't be taken back. Liger is set to Triton's kernel for it by the environment
    variable LIGER_KERNEL_IMPL_ROPE, unless you have set this one or another of Liger's choices.
    Liger's kernels need the model on a GPU.

    `compile` compiles at the first step (minutes on a GPU) and once more, for all lengths, when a
    second length comes; likewise for evaluation. Layers share what was compiled, so that their
    number does not matter. Past `torch._dynamo.config.recompile_limit` (8) variants of a part,
    torch warns and runs it uncompiled. Attention itself and experts are not compiled. A copy of the
    model (`copy.deepcopy`) is not compiled: call this on the copy.

    Raises:
        UnsupportedModelError: `liger` for a family, or an activation, that it has no kernels for.
        ImportError: `liger` without the package.
        ValueError: not a model of transformers, or an unknown `how`.
        The model is unchanged then.

    Example:
        >>> fuse_layers(model, "compile")
        >>> handle = patch(model, LongContextConfig(ring_degree=2, checkpoint="auto"))
    """
    base = transformers_api.causal_lm(model)
    if how == "liger":
        _use_liger(base)
    elif how == "compile":
        for part in _parts(base):
            part.compile()
    elif how != "none":
        names = [name for name in get_args(FusedLayersName) if name != "auto"]
        if how == "auto":
            raise ValueError(
                f"how='auto': choose one of {', '.join(names)}. choose_fused_layers() says which."
            )
        require_choice("how", how, names)


def _parts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Norms, attention and MLP of each decoder layer: what lies between its residual sums.

    Checkpointing happens around a layer or, in newer versions of transformers, inside of it. It
    must see the compiled code both in forward and in the recompute, from the autograd engine.
    """
    has_experts = _has_experts(model)
    for layer in transformers_api.decoder_layers(model):
        for name, part in layer.named_children():
            routes = has_experts and _routes(name, part)
            if not routes and any(True for _ in part.parameters()):
                yield part


def _routes(name: str, part: nn.Module) -> bool:
    """Says whether a part of a layer gives tokens to experts, or is some."""
    inner = {each.rpartition(".")[2] for each, _ in part.named_modules()}
    return bool({"experts", "router"} & (inner | {name}))


def _has_experts(model: PreTrainedModel) -> bool:
    family = FAMILIES.get(model.config.model_type)
    return family is not None and bool({EXPERTS, ROUTER} & set(family.features))


def _not_served(model: PreTrainedModel) -> str | None:
    """Says why Liger Kernel would not compute what the model does; None if it would."""
    family = model.config.model_type
    if family not in LIGER_FAMILIES:
        return f"Liger Kernel has no kernels for {family}, only for {', '.join(LIGER_FAMILIES)}"
    if getattr(model.config, "rms_norm_eps", None) == 0:
        return "rms_norm_eps is 0, and Liger Kernel would compute with 1e-6 instead"
    if not _has_experts(model):
        wanted = tuple({type(ACT2FN[name]) for name in LIGER_FAMILIES[family]})
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _ACTIVATIONS and not isinstance(module, wanted):
                return (
                    f"{name} is {type(module).__name__}, and Liger Kernel would compute "
                    f"{LIGER_FAMILIES[family][0]} instead"
                )
    return None


def _use_liger(model: PreTrainedModel) -> None:
    if (problem := _not_served(model)) is not None:
        raise UnsupportedModelError(f"{problem}. Use how='compile' or how='none'.")
    if (problem := LIGER.problem()) is not None:
        raise ImportError(f"fuse_layers(model, 'liger') {problem}.")
    from transformers.integrations.liger import apply_liger_kernel

    if not any(name in os.environ for name in _LIGER_CHOICES):
        os.environ[_LIGER_CHOICES[0]] = _TRITON
    homes = (sys.modules[base.__module__] for base in type(model).__mro__)
    home = next(module for module in homes if hasattr(module, _ROPE))
    stock = dict(vars(home))
    # The loss is the patched model's, in chunks; Liger's would replace the model's forward.
    kept = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if _has_experts(model):
        kept |= {"swiglu": False, "geglu": False}
    try:
        with without_tiles(model):  # Liger replaces the MLPs' forward, which tiles then run
            apply_liger_kernel(model, kept)
        fused_rope = getattr(home, _ROPE)
    finally:
        # Liger also replaces classes of the family: models that are built later must be stock.
        vars(home).update(stock)
    stock_rope = stock[_ROPE]
    if fused_rope is not stock_rope and not isinstance(stock_rope, _RopeByDevice):
        setattr(home, _ROPE, _RopeByDevice(stock_rope, fused_rope))


Rope = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _RopeByDevice:
    """Replaces a family's rotary embedding, since Liger's kernel runs on GPUs only."""

    stock: Rope
    fused: Rope

    def __call__(self, q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return (self.fused if q.is_cuda else self.stock)(q, *args, **kwargs)
