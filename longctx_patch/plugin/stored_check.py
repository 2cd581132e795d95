"""Checks from headers alone that the files of a checkpoint hold the weights of its model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from longctx_patch.families.load_config import whole_config
from longctx_patch.families.stored_tensors import NeedsWholeReading, read_headers, weight_files
from longctx_patch.families.stored_weights import ALLOW, is_allowed, stored_weights
from longctx_patch.families.text_part import auto_class


def check_stored(name: str, config: Any, allowed: Sequence[str] = ()) -> None:
    """Raise ValueError for weights that are missing, unexpected or of another shape, and for files
    that are cut short or not there.

    Nothing is checked of what is not in safetensors, quantised, or converted while loading:
    `check_loaded` does that after it.

    Args:
        name: a folder, or a hub name whose files are downloaded if need be.
        config: of the model, or of its text model where it reads images too.
        allowed: names, or patterns of names, of weights that may be missing or unexpected.
    """
    path = Path(name).expanduser()
    files = weight_files(str(path) if path.is_dir() else name)
    tensors = read_headers(files)
    if not files or getattr(config, "quantization_config", None) is not None:
        return
    with torch.random.fork_rng(devices=()), suppress(NeedsWholeReading):
        found = whole_config(name) or config
        model = model_without_memory(copy.deepcopy(found), torch.float32)
        stored_weights(model, tensors, allowed)


def check_loaded(name: str, info: Mapping[str, Iterable[Any]], allowed: Sequence[str] = ()) -> None:
    """Raise ValueError for what `from_pretrained(output_loading_info=True)` says of weights."""
    for key, what in (("missing_keys", "is in none of its files"), ("unexpected_keys", "is left")):
        for weight in sorted(map(str, info.get(key, ()))):
            if not is_allowed(weight, allowed):
                end = "" if key == "missing_keys" else " over: this config has no place for it"
                raise ValueError(f"model {name!r}: {weight} {what}{end}. {ALLOW}")


def freeze_as_made(model: Any) -> None:
    """Freeze what the model's code does not train, such as biases by which experts are balanced:
    `from_pretrained` forgets it, and DDP then waits for gradients that never come."""
    made = dict(model_without_memory(model.config, model.dtype).named_parameters())
    for name, parameter in model.named_parameters():
        if name in made and not made[name].requires_grad:
            parameter.requires_grad_(False)


def model_without_memory(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters on the meta device and real buffers, which it computes."""
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    return model
