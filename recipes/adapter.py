"""An adapter over a base model that has no memory: peft merges one module at a time.

The base's parameters are stand-ins of one element each, shaped as the checkpoint's. peft loads the
adapter over them as over any model on the CPU, so ranks, scales, DoRA, saved modules and trained
tokens are what peft makes of them; a module gets real weights only while it is merged.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import PreTrainedConfig

from longctx_patch.families.text_part import auto_class

SUPPORTED = {
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
    *("lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save", "use_dora"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias"),
    *("trainable_token_indices", "runtime_config", "init_lora_weights", "ensure_weight_tying"),
}
"""Fields of an adapter's config that merging covers at any value; others need their default."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base's weights as they are."""
Read = Callable[[str], torch.Tensor]


def load_adapter_config(folder: Path) -> LoraConfig:
    """The adapter's config. Raises ValueError that names the field merging does not cover."""
    with warnings.catch_warnings():
        # The recipe's own mark for loaders that would take the base's RoPE; here it is kept.
        warnings.filterwarnings("ignore", message="Unexpected keyword arguments")
        found = PeftConfig.from_pretrained(str(folder))
    if type(found) is not LoraConfig:
        raise ValueError(
            f"{folder} holds a {found.peft_type} adapter: LoRA adapters are merged. Load it with "
            "peft and call merge_and_unload()."
        )
    usual = LoraConfig()
    odd = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name not in SUPPORTED
        and (getattr(found, field.name) or None) != (getattr(usual, field.name) or None)
    }
    if found.init_lora_weights not in PLAIN_STARTS:
        odd["init_lora_weights"] = found.init_lora_weights
    if odd:
        said = ", ".join(f"{name}={value!r}" for name, value in odd.items())
        raise ValueError(
            f"{folder / 'adapter_config.json'}: {said}: merging does not cover that. Load the "
            "adapter with peft and call merge_and_unload()."
        )
    return found


class AdapterOverBase:
    """The modules that an adapter changes, by their names in the base checkpoint."""

    def __init__(self, folder: Path, adapter: LoraConfig, config: PreTrainedConfig) -> None:
        """Load the adapter in `folder` over stand-ins for the model that `config` describes.

        Raises ValueError where the adapter's tensors don't fit this model, or would untie weights.
        """
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        _stand_in(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of names that peft or transformers moved
                loaded = PeftModel.from_pretrained(
                    model,
                    str(folder),
                    config=adapter,
                    low_cpu_mem_usage=True,
                    torch_device="cpu",
                )
        except (RuntimeError, ValueError, KeyError) as error:
            said = " ".join(map(str.strip, str(error).splitlines()[:2]))
            raise ValueError(
                f"the adapter in {folder} does not fit its base model: {said} Give the base that "
                "it was trained over, with --base."
            ) from error
        self._model = loaded.base_model.model
        self._wrappers = dict(_outermost(self._model))
        if config.tie_word_embeddings:
            _check_tied(self._model, self._wrappers)

    def owners(self) -> dict[str, str]:
        """The module (or parameter) that changes each of these tensors of the checkpoint."""
        found = {
            f"{name}.{tensor}": name
            for name, wrapper in self._wrappers.items()
            for tensor, _ in _base_of(wrapper).named_parameters()
        }
        inside = tuple(f"{name}." for name in self._wrappers)
        for name, value in self._model.named_parameters():
            if not name.startswith(inside) and not _is_stand_in(value):
                found[name] = name  # a bias that the adapter brings along
        return found

    def merged(self, owner: str, read: Read) -> dict[str, torch.Tensor]:
        """The tensors of `owner` with the adapter in them, in float32, by checkpoint names.

        `read` gives the base's tensor of a name. Raises ValueError where a result is not finite.
        """
        if owner not in self._wrappers:
            return {owner: self._model.get_parameter(owner).detach()}
        wrapper, base = self._wrappers[owner], _base_of(self._wrappers[owner])
        stand_ins = dict(base.named_parameters())
        for name, value in stand_ins.items():
            real = read(f"{owner}.{name}") if _is_stand_in(value) else value.detach()
            _set(base, name, real.to(torch.float32))
        if hasattr(wrapper, "unload_and_optionally_merge_module"):
            result = wrapper.unload_and_optionally_merge_module(True, True, None)
        else:
            wrapper.merge(safe_merge=True)
            result = wrapper.get_base_layer()
        values = {f"{owner}.{name}": value.detach() for name, value in result.named_parameters()}
        for name, value in stand_ins.items():
            _set(base, name, value)
        return values


def _stand_in(model: torch.nn.Module) -> None:
    """Put a tensor of one element, read as often as the shape asks, for every parameter.

    It is float32, since peft casts an adapter to its base's dtype.
    """
    made: dict[torch.nn.Parameter, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            made.setdefault(value, torch.zeros(()).expand(value.shape))
            _set(module, name, made[value])


def _is_stand_in(value: torch.Tensor) -> bool:
    return value.untyped_storage().nbytes() < value.nbytes


def _set(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    inner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(value, requires_grad=False)
    setattr(module.get_submodule(inner), leaf, parameter)


def _outermost(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, wrapper) of the modules that peft put in place of the model's own."""
    for name, child in module.named_children():
        is_wrapper = hasattr(child, "unload_and_optionally_merge_module")
        if is_wrapper or hasattr(child, "base_layer"):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _base_of(wrapper: Any) -> torch.nn.Module:
    """The model's own module below a wrapper, and a second wrapper where there is one."""
    base = wrapper.original_module if hasattr(wrapper, "original_module") else wrapper
    return base.get_base_layer() if hasattr(base, "get_base_layer") else base


def _check_tied(model: Any, wrappers: dict[str, Any]) -> None:
    """Refuse an adapter that changes one of two modules that share their weights."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    changed = {name: wrapper for name, wrapper in wrappers.items() if wrapper in ends}
    trains_tokens = all(hasattr(wrapper, "token_adapter") for wrapper in changed.values())
    both = len(changed) == len(ends)
    stay_tied = both and (trains_tokens or _are_equal_copies(*changed.values()))
    if changed and not stay_tied:
        raise ValueError(
            f"the adapter changes {' and '.join(changed)}, and the base's embeddings and head "
            "share their weights (tie_word_embeddings): merged, the change of one would be in "
            "both. Load the adapter with peft, over a base saved with tie_word_embeddings=False."
        )


def _are_equal_copies(one: Any, other: Any) -> bool:
    """Says whether two wrappers train the same weights as a whole (`ensure_weight_tying`)."""
    saved = all(hasattr(wrapper, "modules_to_save") for wrapper in (one, other))
    return saved and torch.equal(one.weight, other.weight)
