"""Modules outside attention that mix tokens, found on the first training step.

A patched model hands a rank's share of the tokens to every module. That is right for attention and
for the recurrences that cross the ranks, and for what computes each token by itself, as MLPs and
norms of transformers do. Whether code of others does is tried: on the first step each of its
modules in the decoder also runs on a single token, without gradients, which must give what it gives
for that token among the others.

Not seen are a decoder layer's own forward, hooks, and modules that have hooks or draw dropout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from longctx_patch.hf.model import transformers_api

KNOWN_CODE = frozenset(
    {
        *("torch", "transformers", "accelerate", "peft", "bitsandbytes", "liger_kernel"),
        "longctx_patch",
    }
)
"""Packages whose modules outside attention compute each token by itself, in models and with
adapters that `patch` takes."""
TOLERANCE = 0.05
"""How far numbers may differ, of the largest: bfloat16 products of one row and of many differ by
1 %."""


class _Place(NamedTuple):
    """Which token of a module's inputs is tried."""

    dim: int
    num_tokens: int

    def token(self, value: Any) -> Any:
        """The part of an input or output that belongs to the token."""
        if not isinstance(value, Tensor) or value.ndim <= self.dim:
            return value
        if value.shape[self.dim] != self.num_tokens:
            return value
        return value.narrow(self.dim, self.num_tokens // 2, 1)


@dataclass
class TokenProbe:
    """Tries modules of one model while a forward pass runs, until `end`."""

    problem: str | None = None
    """The first module that mixes tokens, in words."""
    _alone: dict[int, tuple[_Place, Tensor]] = field(default_factory=dict)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> "TokenProbe":
        probe = cls()
        for name, module in _foreign_modules(model):
            probe._hooks += [
                module.register_forward_pre_hook(probe._before, with_kwargs=True),
                module.register_forward_hook(probe._after(name)),
            ]
        return probe

    def end(self) -> str | None:
        """Take the hooks off, and return the problem."""
        while self._hooks:
            self._hooks.pop().remove()
        return self.problem

    # The single token runs first, so that what a module keeps of its last call is that of all.
    @torch.compiler.disable
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        place = _place(args, kwargs)
        if place is None or place.num_tokens < 2:
            return
        own = {name: place.token(value) for name, value in kwargs.items()}
        try:
            with torch.no_grad():
                found = _first(module.forward(*map(place.token, args), **own))
        except Exception:  # it may count on the shape of whole rows: nothing is learned of it
            return
        if found is not None:
            self._alone[id(module)] = place, found

    def _after(self, name: str) -> Callable[..., None]:
        @torch.compiler.disable
        def compare(module: nn.Module, args: object, outputs: Any) -> None:
            place, alone = self._alone.pop(id(module), (None, None))
            among = None if place is None else place.token(_first(outputs))
            if among is None or alone is None or among.shape != alone.shape:
                return
            error = (among.detach() - alone).abs().max() / alone.abs().max().clamp(min=1e-30)
            if self.problem is None and float(error) > TOLERANCE:
                self.problem = (
                    f"{name} ({type(module).__module__}.{type(module).__name__}) gives a token "
                    f"alone something else than among others, by {float(error):.0%}: it mixes "
                    "tokens, or draws random numbers, and ranks have shares of a row only. Use a "
                    "module that computes each token by itself, or one process"
                )

        return compare


def _foreign_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of the decoder, beside its mixing ones, that others have written."""
    mixing = {id(module) for module, _ in transformers_api.mixing_modules(model)}
    found: set[int] = set()
    for name, module in transformers_api.decoder_of(model).named_modules():
        parts = list(module.modules())
        if id(module) in found or not mixing.isdisjoint(map(id, parts)):
            continue
        if _is_foreign(module):
            found.update(map(id, parts))
            if not any(map(_is_in_the_way, parts)):
                yield name, module


def _is_foreign(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    forwards = type(module).forward, own, getattr(own, "below", None)
    homes = (getattr(forward, "__module__", None) for forward in forwards if forward is not None)
    return any(str(home).partition(".")[0] not in KNOWN_CODE for home in homes)


def _is_in_the_way(part: nn.Module) -> bool:
    """Says whether a module would give, or others would see, something else in a second call."""
    draws = isinstance(part, _DropoutNd) and part.training and part.p > 0
    return draws or bool(part._forward_hooks or part._forward_pre_hooks)


def _place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Place | None:
    """Returns where the tokens are: `[B, L, ...]`, ids `[B, L]`, or `[tokens, hidden]`."""
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if first is None or first.ndim < 2:
        return None
    dim = 1 if first.ndim > 2 or not first.is_floating_point() else 0
    return _Place(dim, first.shape[dim])


def _first(outputs: Any) -> Tensor | None:
    found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return found if isinstance(found, Tensor) and found.is_floating_point() else None
