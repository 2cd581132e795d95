"""Embeddings and norms that are trained beside a LoRA adapter (LongLoRA, arXiv 2309.12307), as
copies in float32 that PEFT saves with it (`modules_to_save`)."""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from longctx_patch.rules.names import require_choice

ALSO_TRAINED = ("embeddings", "norms")


def also_trained(given: Sequence[str]) -> list[str]:
    """The names in `given`, some of which may hold several: `embeddings,norms`."""
    names = [name for item in given for name in item.split(",")]
    for name in names:
        require_choice("also_train", name, ALSO_TRAINED)
    return [name for name in ALSO_TRAINED if name in names]


def check_precision(also_train: Sequence[str], dtype: str, mixed_precision: str) -> None:
    """Refuse copies in float32 amid weights of 16 bits where nothing casts between them."""
    if also_train and dtype != "float32" and mixed_precision == "no":
        raise ValueError(
            f"also_train={','.join(also_train)} with dtype={dtype} and mixed_precision=no: they "
            "are trained in float32, and products of frozen weights would get inputs of another "
            "dtype. Use dtype: float32, or mixed_precision: bf16 in the YAML of accelerate."
        )


def adapter_options(
    model: Any, also_train: Sequence[str], targets: Sequence[str]
) -> dict[str, Any]:
    """Options of LoraConfig that train these modules as a whole, beside factors at `targets`.

    Raises ValueError for modules that this model doesn't have so that PEFT can train them.
    """
    embeddings = model.get_input_embeddings()
    chosen = {embeddings} if "embeddings" in also_train else set()
    if "norms" in also_train:
        norms = {module for module in model.modules() if _is_norm(module)}
        if not norms:
            raise ValueError(
                f"also_train=norms: those of a {model.config.model_type} model have no weights. "
                "Leave `norms` out."
            )
        chosen |= norms
    named = {name: module for name, module in model.named_modules() if module in chosen}
    last = {name: name.rpartition(".")[2] for name in named}
    ends = tuple(sorted({name if end.isdigit() else end for name, end in last.items()}))
    for name, module in model.named_modules():  # PEFT takes each whose name ends so
        is_other = name not in named and any(True for _ in module.parameters(recurse=False))
        if name.endswith(ends) and is_other:
            raise ValueError(
                f"also_train={','.join(also_train)}: {name} is named as a norm or an embedding is, "
                "but is none, and PEFT would train it too. Leave also_train out for this model."
            )
    ties = embeddings in chosen and _ties(model)
    head = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), "")
    if ties and (both := [name for name in targets if name.rpartition(".")[2] == head]):
        raise ValueError(
            f"lora_targets {both[0]} with also_train=embeddings: the head shares the embeddings' "
            "weights, which are trained as a whole then. Leave it out of lora_targets."
        )
    return {"modules_to_save": list(ends) or None, "ensure_weight_tying": ties}


def prepare_copies(model: Any, *, ties: bool) -> None:
    """Make the copies of a PEFT model float32, and let PEFT save them while the model is trained.

    Raises ValueError where PEFT has not tied those of tied embeddings (`ties`).
    """
    for module in model.modules():
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict):
            copies.to(torch.float32)
            vars(module)["adapter_state_dict"] = MethodType(_saved, module)
    if ties and not _ties(model):
        raise ValueError(
            f"also_train=embeddings: the head of a {model.config.model_type} model shares the "
            "embeddings' weights, and PEFT trains a copy for one of them. Leave `embeddings` out."
        )


def _saved(wrapper: Any, adapter: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """A wrapper's `adapter_state_dict`. PEFT's own asks the copy for its state_dict, which under
    FSDP2 frees weights that another thread may be computing with."""
    names = dict(wrapper.modules_to_save[adapter].named_parameters())
    return {name: weights[f"modules_to_save.{adapter}.{name}"] for name in names}


def _is_norm(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    return "norm" in type(module).__name__.lower() and len(own) == len([*module.parameters()]) > 0


def _ties(model: Any) -> bool:
    """Says whether embeddings and head share their weights."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return all(end is not None for end in ends) and ends[0].weight is ends[1].weight
