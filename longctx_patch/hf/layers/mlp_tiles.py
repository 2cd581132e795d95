"""The MLPs of one patched model, run over tiles of its tokens.

Each module gets its own forward and stays in its place. So names of parameters, adapters and
FSDP2's wrapping are as before, and hooks on the module see all tokens. Layers with experts stay
whole. Tiles would change no result, since experts are chosen for each token; but hooks inside these
layers collect router logits, and backward would collect them a second time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from longctx_patch.families.facts import ModelFacts
from longctx_patch.hf.model import transformers_api
from longctx_patch.memory.last_product import is_plain
from longctx_patch.memory.limits import tiles_that_fit
from longctx_patch.memory.meter import total_bytes
from longctx_patch.memory.tiled_mlp import run_tiled

MLP_CODE = ("transformers.models.", "liger_kernel.")
"""Packages whose MLPs return the result of their down projection as it is."""

FindBytes = Callable[[torch.device], int | None]


def bind_mlps(
    model: PreTrainedModel, asked: int | None, find_bytes: FindBytes = total_bytes
) -> Callable[[], None]:
    """Run the MLPs of a model by tiles; return a function that undoes it.

    `asked` is the number of tiles. With None, `tiles_that_fit` computes it for the memory that
    `find_bytes` finds on the device. Ranks need not agree on it, since an MLP sends nothing.
    """
    if asked == 1:
        return lambda: None
    size = ModelFacts.of(model.config).intermediate_size
    for mlp in transformers_api.dense_mlps(model):
        if mlp is not None:
            below = vars(mlp).get("forward")
            vars(mlp)["forward"] = TiledForward(mlp, below, asked, size, find_bytes)

    def restore() -> None:
        for tiled in _tiled_forwards(model):
            tiled.take_off()

    return restore


def tiles_of_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The number of tiles in which each layer's MLP ran last."""
    return tuple(
        max((tiled.num_tiles for tiled in _tiled_forwards(layer)), default=1)
        for layer in transformers_api.decoder_layers(model)
    )


@contextmanager
def without_tiles(model: PreTrainedModel) -> Iterator[None]:
    """Within the context MLPs can be given another forward; tiles are then made of the new one."""
    tiled_forwards = list(_tiled_forwards(model))
    for tiled in tiled_forwards:
        tiled.take_off()
    try:
        yield
    finally:
        for tiled in tiled_forwards:
            tiled.put_on()


@dataclass(eq=False)
class TiledForward:
    """Takes the place of a module's forward. It refers to no other module of the model, since
    modules may be copied."""

    module: nn.Module
    below: Callable[..., Any] | None
    """The instance's own forward, such as Liger Kernel sets; None: its class's."""
    asked: int | None
    intermediate_size: int
    find_bytes: FindBytes
    num_tiles: int = 1
    """The number of tiles in the last call."""
    _compiled: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)

    # The autograd function can't be traced; what runs for a tile is compiled by itself.
    @torch.compiler.disable
    def __call__(self, hidden: Tensor) -> Tensor:
        self.num_tiles = self._number(hidden)
        last = self._last_layer() if self.num_tiles > 1 else None
        return run_tiled(self._forward(), self.module, hidden, self.num_tiles, last)

    def take_off(self) -> None:
        del vars(self.module)["forward"]
        if self.below is not None:
            vars(self.module)["forward"] = self.below

    def put_on(self) -> None:
        self.below = vars(self.module).get("forward")
        vars(self.module)["forward"] = self

    def _number(self, hidden: Tensor) -> int:
        number = max(1, min(self.asked or self._number_that_fits(hidden), hidden.shape[-2]))
        if number == 1:
            return 1
        obstacle = _obstacle(self.module)
        if obstacle is None or self.asked is None:
            return number if obstacle is None else 1
        raise ValueError(f"mlp_tiles={self.asked}: {obstacle}, or mlp_tiles=1.")

    def _number_that_fits(self, hidden: Tensor) -> int:
        """The number of tiles that fit, by the bytes of gate, up and their product."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        numbers = 3 * self.intermediate_size * hidden.shape[:-1].numel()
        return tiles_that_fit(numbers * dtype.itemsize, self.find_bytes(hidden.device))

    def _last_layer(self) -> nn.Linear | None:
        """The down projection, if the MLP's code is known to return its result as it is."""
        last = getattr(self.module, "down_proj", None)
        known = _is_known(type(self.module).forward) and (
            self.below is None or _is_known(self.below)
        )
        compiled = any(m._compiled_call_impl is not None for m in self.module.modules())
        return last if known and not compiled and is_plain(last) else None

    def _forward(self) -> Callable[[Tensor], Tensor]:
        own = self.below
        if own is not None and getattr(own, "__self__", None) is not self.module:
            return own
        function = type(self.module).forward if own is None else own.__func__  # type: ignore[attr-defined]
        # Compiled code may draw other random numbers with gradients than without them.
        if self.module._compiled_call_impl is not None and not _draws(self.module):
            # The function, not the method, is compiled, so that all layers share the result.
            if function not in self._compiled:
                self._compiled[function] = torch.compile(function)
            function = self._compiled[function]
        return MethodType(function, self.module)


def _is_known(forward: object) -> bool:
    """Says whether a function or method was written in `MLP_CODE`. A wrapper carries the names of
    what it wraps, and does not count."""
    function = getattr(forward, "__func__", forward)
    return (
        isinstance(function, FunctionType)
        and not hasattr(function, "__wrapped__")
        and function.__globals__.get("__name__", "").startswith(MLP_CODE)
    )


def _tiled_forwards(module: nn.Module) -> Iterator[TiledForward]:
    """The tiled forwards of a module and of all modules in it; PEFT may have copied some."""
    for each in module.modules():
        found = vars(each).get("forward")
        if isinstance(found, TiledForward):
            yield found


def _obstacle(module: nn.Module) -> str | None:
    """Says why the MLP can't run in tiles as it is wrapped, and what to do; None if it can."""
    for name, within in module.named_modules():
        if name and isinstance(within, FSDPModule):
            return (
                f"FSDP2 is around {name!r} inside an MLP, so that its weights would be gathered "
                "for each tile and be gone when backward needs them. Use fully_shard on the MLP or "
                "the layer as a whole"
            )
        for attribute, value in vars(within).items():
            if isinstance(value, Tensor) and value.requires_grad:
                place = ".".join(filter(None, (name, attribute)))
                return (
                    f"{place!r} of an MLP is trained but no parameter, so that its gradient would "
                    "be lost (FSDP1 makes its weights so). Use FSDP2 or DDP"
                )
    return None


def _draws(module: nn.Module) -> bool:
    """Says whether dropout is active within."""
    return any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in module.modules())
