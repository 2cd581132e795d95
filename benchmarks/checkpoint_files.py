"""A checkpoint of a config in bfloat16, one file of safetensors for each layer, and one for the
rest."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

WriteFile = Callable[[Path, Mapping[str, Tensor]], object]
"""Writes tensors of the shapes of these, which have no numbers, to one file."""
PATTERN = 2**20 + 7
"""How many numbers are drawn; larger tensors repeat them."""
SPREAD = 0.02
"""Standard deviation of the numbers, as models are initialised."""


def write_files(folder: Path, config: Any, write_file: WriteFile) -> int:
    """Write config, index and files; returns the bytes of the weights."""
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.named_parameters():  # tied ones once
        words = name.split(".")
        number = words[2] if words[1] == "layers" else "rest"
        files.setdefault(f"model-{number}.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        write_file(folder / file, tensors)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def write_random(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Norms are ones; all else repeats the same random numbers, which takes no time to draw."""
    drawn = torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)).mul(SPREAD).bfloat16()

    def numbers(tensor: Tensor) -> Tensor:
        if tensor.ndim == 1:
            return torch.ones_like(tensor, device="cpu")
        times = -(-tensor.numel() // PATTERN)
        return drawn.repeat(times)[: tensor.numel()].reshape(tensor.shape)

    save_file({name: numbers(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
