"""An adapter over a base model that has no memory: peft merges one module at a time.

The base's parameters are stand-ins of one element each, shaped as the checkpoint's. peft loads the
adapter over them as over any model on the CPU, so ranks, scales, DoRA, saved modules and trained
tokens are what peft makes of them; a module gets real weights only while it is merged.
"""

import dataclasses
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from longctx_patch.families.stored_tensors import NeedsWholeReading, StoredTensor
from longctx_patch.families.stored_weights import StoredWeight, places_of
from longctx_patch.families.text_part import auto_class

SUPPORTED = {
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
    *("lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save", "use_dora"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias"),
    *("trainable_token_indices", "runtime_config", "init_lora_weights", "ensure_weight_tying"),
    "target_parameters",
}
"""Fields of an adapter's config that merging covers at any value; others need their default."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base's weights as they are."""


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


MISSING = "missing adapter keys"
"""What peft warns of where an adapter's file has less than its config says."""
SINGLE = re.compile(r"\.experts\.\d")
"""What the name of a single expert has, in a model whose experts are not one tensor."""


class _Changed(NamedTuple):
    """A weight that an adapter changes."""

    owner: str
    """The module that does so, or the weight itself where no module of PEFT's is around it."""
    shape: torch.Size


class AdapterOverBase:
    """The modules that an adapter changes, by their names in the model."""

    def __init__(
        self,
        folder: Path,
        adapter: LoraConfig,
        config: PreTrainedConfig,
        tensors: dict[str, StoredTensor],
    ) -> None:
        """Load the adapter in `folder` over stand-ins for the model that `config` describes.

        `tensors` are those of the checkpoint. Raises ValueError where the adapter's tensors don't
        fit this model or this checkpoint, or would untie weights.
        """
        model = _without_numbers(config)
        stored = _names_in(folder)
        if not any(SINGLE.search(name) for name, _ in model.named_modules()):
            _refuse_single_experts(folder, adapter, stored)
        self._nothing = _stand_in(model)
        loaded = _loaded(folder, adapter, model, stored)
        self._model = loaded.base_model.model
        self._wrappers = dict(_outermost(self._model))
        if config.tie_word_embeddings:
            _check_tied(self._model, self._wrappers)

        self._changed = self._changed_weights()
        self._places = _places(config, tensors, self._changed)
        for name, place in self._places.items():
            if place.shape != (shape := tuple(self._changed[name].shape)):
                raise ValueError(
                    f"{place.file}: {place.keys[0]} makes {name} {list(place.shape or ())}, by the "
                    f"base's config it has {list(shape)}. Give the folder that belongs to it."
                )

    def _changed_weights(self) -> dict[str, _Changed]:
        """Returns the weights that the adapter changes, by their names in the model."""
        found = {
            f"{name}.{tensor}": _Changed(name, value.shape)
            for name, wrapper in self._wrappers.items()
            for tensor, value in _base_of(wrapper).named_parameters()
        }
        inside = tuple(f"{name}." for name in self._wrappers)
        for name, value in self._model.named_parameters():
            if not name.startswith(inside) and not self._is_stand_in(value):
                found[name] = _Changed(name, value.shape)  # a bias that the adapter brings along
        return found

    def missing(self) -> list[str]:
        """Returns the weights that the adapter changes and the checkpoint does not have."""
        return [name for name in self._changed if name not in self._places]

    def owners(self) -> dict[str, str]:
        """The module (or parameter) that changes each of these tensors of the checkpoint."""
        return {
            key: self._changed[name].owner
            for name, place in self._places.items()
            for key in place.keys
        }

    def merged(self, owner: str) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors of `owner` with the adapter in them, in float32, by their keys;
        those of experts are parts of one tensor. Raises ValueError where a result is not finite.
        """
        if owner not in self._wrappers:
            return self._places[owner].tensors_in(self._model.get_parameter(owner).detach())
        wrapper, base = self._wrappers[owner], _base_of(self._wrappers[owner])
        stand_ins = dict(base.named_parameters())
        for name, value in stand_ins.items():
            is_own = not self._is_stand_in(value)
            real = value.detach().float() if is_own else self._read(f"{owner}.{name}", value.shape)
            _set(base, name, real)
        if hasattr(wrapper, "unload_and_optionally_merge_module"):
            result = wrapper.unload_and_optionally_merge_module(True, True, None)
        else:
            wrapper.merge(safe_merge=True)
            result = wrapper.get_base_layer()
        values: dict[str, torch.Tensor] = {}
        for name, value in result.named_parameters():
            values |= self._places[f"{owner}.{name}"].tensors_in(value.detach())
        for name, value in stand_ins.items():
            _set(base, name, value)
        return values

    def _is_stand_in(self, value: torch.Tensor) -> bool:
        """Says so of copies that PEFT makes too, but for those of one element."""
        is_spread = value.untyped_storage().nbytes() < value.nbytes
        return is_spread or value.data_ptr() == self._nothing.data_ptr()

    def _read(self, name: str, shape: torch.Size) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.float32)
        self._places[name].read_into(out, 0, torch.float32)
        return out


def _without_numbers(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def _refuse_single_experts(folder: Path, adapter: LoraConfig, stored: Iterable[str]) -> None:
    """Refuse factors of one expert each, as transformers 4 had them, where their scale is no single
    number: peft puts them together under the scale of what it puts them into."""
    patterns = [*adapter.rank_pattern, *adapter.alpha_pattern]
    for key in filter(SINGLE.search, stored):
        name = key.partition(".lora_")[0]
        own = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), None)
        if adapter.use_rslora or own:
            raise ValueError(
                f"the adapter in {folder}: {key} is of one expert, with "
                f"{'use_rslora' if adapter.use_rslora else f'a pattern {own!r}'}: peft gives such "
                "factors another scale. Merge with the transformers 4 that trained it."
            )


def _names_in(folder: Path) -> list[str]:
    """The names of the adapter's tensors. Raises ValueError where its file can't be read."""
    try:
        return [*load_peft_weights(str(folder), device="cpu")]
    except (OSError, SafetensorError, UnpicklingError, ValueError) as error:
        raise ValueError(
            f"the adapter in {folder} has no whole file of weights ({error}). Copy it again, or "
            "take another checkpoint-N."
        ) from error


def _loaded(
    folder: Path, adapter: LoraConfig, model: torch.nn.Module, stored: Collection[str]
) -> Any:
    """The model with the adapter that is in `folder`, whole."""
    advice = "Give the base that it was trained over, with --base."
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")  # not shown: of names that peft or transformers moved
            loaded = PeftModel.from_pretrained(
                model, str(folder), config=adapter, low_cpu_mem_usage=True, torch_device="cpu"
            )
        said = next((str(each.message) for each in told if MISSING in str(each.message)), None)
        missing = re.findall(r"'([^']+)'", said or "")
        if missing and missing[0].replace(".default", "") in stored:
            advice = "Its file has them: peft can't load them into a model of this type."
    except (RuntimeError, ValueError, KeyError) as error:
        said = " ".join(map(str.strip, str(error).splitlines()[:2]))
    if said is not None:
        raise ValueError(
            f"the adapter in {folder} does not fit its base model: {said[:400]} {advice}"
        )
    for name, value in loaded.named_parameters():
        if "lora_" in name and not value.isfinite().all():
            raise ValueError(
                f"the adapter in {folder}: {name} has numbers that are not finite. Merge an "
                "earlier checkpoint-N."
            )
    return loaded


def _places(
    config: PreTrainedConfig, tensors: dict[str, StoredTensor], names: Iterable[str]
) -> dict[str, StoredWeight]:
    """What files hold for these weights: under the same names or, as experts that are one tensor of
    the model, as transformers puts them together."""
    found = {n: StoredWeight(((tensors[n],),), stacked=False) for n in names if n in tensors}
    model = _without_numbers(config)
    missing = set(names) - found.keys()
    if config.tie_word_embeddings:  # of a tied head the files have the embeddings alone
        missing -= model.all_tied_weights_keys.keys()
    if missing:
        try:
            found |= places_of(model, tensors, missing)
        except NeedsWholeReading as error:
            raise ValueError(
                f"{error} Load the adapter with peft and call merge_and_unload()."
            ) from error
    return found


def _stand_in(model: torch.nn.Module) -> torch.Tensor:
    """Put one number, read as often as the shape asks, for every parameter, and return it.

    It is float32, since peft casts an adapter to its base's dtype.
    """
    nothing = torch.zeros(())
    made: dict[torch.nn.Parameter, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            made.setdefault(value, nothing.expand(value.shape))
            _set(module, name, made[value])
    return nothing


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
