"""Ranks compare what must be the same on all of them, before they train on it.

A rank with another learning rate trains on garbage without an error, and one with another number of
steps leaves the others waiting. So all ranks compare a digest first, and only if that differs the
facts themselves.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from platform import python_version
from typing import Any

import torch
from torch import Tensor, nn

from longctx_patch.rules.together import of_all_ranks
from longctx_patch.rules.versions import installed_version

PACKAGES = ("longctx-patch", "torch", "transformers", "accelerate", "peft", "trl", "numpy")
MOST_FIELDS, MOST_CHARACTERS = 8, 60
SAMPLED = 64
"""Values of each weight that are compared."""


def require_agreement(facts: Mapping[str, Any], what: str) -> None:
    """Raise ValueError on all ranks unless `facts` are the same on all of them. Collective over the
    world.

    Args:
        facts: anything with a `repr` that says it all, in any nesting of mappings.
        what: is compared, in words.

    Raises:
        ValueError: with each field that differs, its values, and the ranks that have them.

    Example:
        >>> facts = {"learning_rate": 1e-5, "steps": 100} | model_facts(model)
        >>> require_agreement(facts, "what to train")
    """
    flat = dict(_flattened(facts))
    digest = blake2b(repr(sorted(flat.items())).encode(), digest_size=16).hexdigest()
    if len(set(of_all_ranks(digest))) == 1:
        return
    everyones = of_all_ranks(flat)
    names = dict.fromkeys(name for one in everyones for name in one)
    lines = [line for name in names if (line := _difference(name, everyones))]
    more = f"\n  and {len(lines) - MOST_FIELDS} more fields" if len(lines) > MOST_FIELDS else ""
    shown = "\n  ".join(lines[:MOST_FIELDS])
    raise ValueError(
        f"the ranks disagree about {what}:\n  {shown}{more}\n"
        "Start all processes with the same command, files and packages."
    )


def launch_settings() -> dict[str, str]:
    """Returns what the launch file says of FSDP and of parallelism: ranks that gather weights at
    other times wait for each other forever."""
    ours = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_")
    found = {name: value for name, value in os.environ.items() if name.startswith(ours)}
    return {f"launch file: {name}": value.lower() for name, value in found.items()}


def versions() -> dict[str, str]:
    """Returns the versions of the packages whose numbers or exchanges ranks share."""
    return {"python": python_version()} | {name: installed_version(name) for name in PACKAGES}


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Config, parameters and a sample of the weights of a model that is not sharded yet, for
    `require_agreement`."""
    config = getattr(model, "config", None)
    named = {name: p for name, p in model.named_parameters() if isinstance(p, Tensor)}
    return {
        "config": _plain_config(config),
        "parameters": {name: _described(parameter) for name, parameter in named.items()},
        "weights": _samples(named),
    }


def _plain_config(config: Any) -> dict[str, Any]:
    """A model's config without where it was loaded from, which may differ between machines."""
    if not hasattr(config, "to_dict"):
        return {}
    hidden = ("_name_or_path", "name_or_path")
    return {name: value for name, value in config.to_dict().items() if name not in hidden}


def _described(parameter: Tensor) -> str:
    kind = "trained" if parameter.requires_grad else "frozen"
    return f"{kind}, {list(parameter.shape)}, {parameter.dtype}"


def _samples(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of some values of each weight, spread over it; none of weights that are yet to be
    read. One copy to the host."""
    held = {
        name: _sample(parameter.detach())
        for name, parameter in named.items()
        if parameter.device.type != "meta" and parameter.numel()
    }
    by_device: dict[torch.device, list[str]] = {}
    for name, sample in held.items():
        by_device.setdefault(sample.device, []).append(name)
    found = {}
    for names in by_device.values():
        sizes = [held[name].numel() for name in names]
        joined = torch.cat([held[name] for name in names]).cpu()
        for name, part in zip(names, joined.split(sizes), strict=True):
            found[name] = blake2b(part.numpy().tobytes(), digest_size=8).hexdigest()
    return found


def _sample(weight: Tensor) -> Tensor:
    """The bytes of some values: `[n]`, uint8."""
    step = max(1, weight.numel() // SAMPLED)
    flat = weight.flatten() if not weight.is_contiguous() else weight.view(-1)
    return flat[::step].contiguous().view(torch.uint8)


def _flattened(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", repr(value)


def _difference(name: str, everyones: list[dict[str, str]]) -> str:
    """`name: value on ranks ..., value on rank ...`; empty where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyones):
        ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
    if len(ranks) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{value[:MOST_CHARACTERS]} on {_ranks(those)}" for value, those in ranks.items()
    )


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    some = ", ".join(map(str, numbers[:MOST_FIELDS]))
    return f"ranks {some}" + ", ..." * (len(numbers) > MOST_FIELDS)
