"""Random weights of a bare config, drawn on a device, one layer after the other.

`from_config` draws on the CPU, 17 seconds for a billion weights, and holds all of them. Here the
model's own code initialises each layer on the device by a seed of its own, so that a weight depends
neither on what was drawn before it nor on how many processes share the model. These are other
numbers than the CPU's generator draws, of the same distributions.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx_patch.families.text_part import auto_class
from longctx_patch.plugin.stored_check import model_without_memory

Initialise = Callable[[nn.Module], object]
LEFT_AS_MADE = "apertus", "apertus1p5_text"
"""Model types with weights that only their constructors give values: an activation's."""


def random_model(config: Any, dtype: torch.dtype, *, draw_on: torch.device) -> Any:
    """A model on the CPU with random weights by torch's current seed: of a GPU those of
    `RandomWeights`, else those of `from_config`."""
    if not can_draw(config, draw_on):
        return auto_class(config).from_config(config, dtype=dtype)
    model = model_without_memory(config, dtype)
    _fill(model, RandomWeights(config, dtype, draw_on, drawn_seed()))
    return model


def can_draw(config: Any, device: torch.device | None) -> bool:
    """Says whether weights are drawn here: on a GPU. On the CPU `from_config` draws them."""
    return device is not None and device.type != "cpu" and config.model_type not in LEFT_AS_MADE


def drawn_seed() -> int:
    """A seed that is drawn from torch's generator on the CPU."""
    return int(torch.randint(2**62, ()))


class RandomWeights:
    """Draws the weights of a transformers model, of which one layer is on the device at once."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        with torch.random.fork_rng(devices=()):
            self._model = model_without_memory(copy.deepcopy(config), dtype)
        self._device, self._seed = device, seed
        self._units = dict(_units(self._model))
        self._drawn: dict[str, Tensor] = {}

    def take(self, names: Sequence[str]) -> Tensor:
        """A whole weight, by its name in the model, or its names if it is tied: the first counts.

        Raises ValueError for a weight that the model's code leaves as it finds it.
        """
        name = names[0]
        if name not in self._drawn:
            self._drawn = self._draw(self._units[name])
        return self._drawn.pop(name)

    @torch.no_grad()
    def _draw(self, unit_name: str) -> dict[str, Tensor]:
        unit = self._model.get_submodule(unit_name)
        with _seeded(self._seed, unit_name, self._device):
            _move(unit, lambda weight: torch.full_like(weight, torch.nan, device=self._device))
            _initialise(unit, self._initialiser_of(unit_name))
        named = unit.named_parameters(prefix=unit_name, remove_duplicate=False)
        drawn = {name: parameter.detach() for name, parameter in named}
        _move(unit, lambda weight: weight.to("meta"))
        for name, weight in drawn.items():
            if weight.isnan().any():
                raise ValueError(
                    f"{name} has no initial values: the code of {type(self._model).__name__} does "
                    "not initialise it. Give a checkpoint in place of a bare config."
                )
        return drawn

    def _initialiser_of(self, name: str) -> Initialise:
        """The initialiser of the innermost transformers model that holds a module."""
        found: Any = self._model
        for holder in map(self._model.get_submodule, _prefixes(name.split("."))):
            found = holder if isinstance(holder, PreTrainedModel) else found
        return cast(Initialise, found._init_weights)


def _fill(model: nn.Module, weights: RandomWeights) -> None:
    """Put weights into a model on the meta device."""
    made: dict[int, nn.Parameter] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if id(old) not in made:
            weight = weights.take([name]).cpu()
            made[id(old)] = nn.Parameter(weight, requires_grad=old.requires_grad)
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, made[id(old)])


def _units(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each weight with the module that is initialised at once: the layer that it belongs to, whose
    code may write to the weights of what is in it, or the module that holds it."""
    layers = {
        f"{path}.{number}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for number in range(len(module))
    }
    for name, _ in model.named_parameters(remove_duplicate=False):
        holders = list(_prefixes(name.split(".")[:-1]))
        yield name, next((holder for holder in holders if holder in layers), holders[-1])


def _prefixes(words: list[str]) -> Iterator[str]:
    """Names of a module's holders and its own, from the outermost on."""
    for length in range(1, len(words) + 1):
        yield ".".join(words[:length])


def _move(unit: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    for module in unit.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(make(weight.detach()))


def _initialise(module: nn.Module, initialise: Initialise) -> None:
    """Initialises what is within a module before the module itself, as transformers does."""
    for child in module.children():
        inner = child._init_weights if isinstance(child, PreTrainedModel) else initialise
        _initialise(child, inner)
    initialise(module)


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Within the context torch's generators have a seed of this name; afterwards they are as they
    were."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield
