"""A decoder layer's MLP, one tile of the sequence at a time, in forward and in backward.

An MLP treats each token by itself. So its intermediates (gate, up, and their product: 3 *
intermediate size numbers a token, 10 times a hidden state in Llama 3) need not exist for all tokens
at once. Forward keeps the layer's hidden states and nothing else; backward computes a tile again,
takes its gradients, and goes on to the next one. This is TiledMLP of ALST (Arctic Long Sequence
Training, arXiv 2506.13996, section on sequence tiling), after the blockwise feed-forward of
Blockwise Parallel Transformer (Liu & Abbeel 2023, arXiv 2305.19370).

Unlike in ALST, parameters are inputs of one autograd function. Each gets one gradient in a backward
pass, already summed over tiles, so hooks, DDP, FSDP2 and gradient accumulation find what the whole
MLP would give them.

B rows, L tokens, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx_patch.memory.last_product import is_plain, left_out
from longctx_patch.memory.random_state import RandomState

Forward = Callable[[Tensor], Tensor]


def run_tiled(
    forward: Forward,
    module: nn.Module,
    hidden: Tensor,
    num_tiles: int,
    last: nn.Linear | None = None,
) -> Tensor:
    """Compute `forward(hidden)` in tiles whose sizes differ by one token at most.

    The result and its gradients are those of `forward(hidden)` up to rounding, since matrix
    products of fewer rows may be summed in another order. With one tile it is `forward(hidden)`
    itself, which keeps its intermediates. Without gradients nothing is kept.

    Gradients of parameters are summed over tiles in float32 or wider, and rounded to the dtype of
    the parameter at the end; those of one tile come in that dtype. While a module's backward runs,
    the sum takes 4 bytes for each of its trained numbers, besides the gradients of a tile.
    Parameters without `requires_grad` (quantised weights under LoRA, say) take part and cost
    nothing.

    Backward computes tiles under the autocast of forward, and draws dropout's random numbers again
    from the state that forward began with. These numbers differ from those that a single tile
    draws.

    Args:
        forward: what `module` computes token by token: `[B, n, D] -> [B, n, E]`. It runs twice for
            each tile, and sees only that tile's tokens.
        module: the module whose parameters `forward` uses. They are looked up during this call,
            since FSDP2 swaps them.
        hidden: `[B, L, D]`, any float dtype.
        num_tiles: how many tiles; at most L are made.
        last: a layer of `module` whose result `forward` returns without looking at it, so that
            backward need not compute it. Where `forward` returns something else, backward notices
            this and starts again with the layer itself.

    Raises:
        RuntimeError: in backward, if parameters have changed since forward, as for any operation of
            torch, or if `forward` depends on a trained tensor outside of `module`, whose gradient
            would be lost.
    """
    num_tiles = min(num_tiles, hidden.shape[-2])
    if num_tiles <= 1:
        return forward(hidden)
    mlp = _TiledMlp(forward, module, num_tiles, last, _autocast_now(hidden.device.type))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
        return mlp.run(hidden)
    kept: Tensor = _Keep.apply(hidden, *trained)
    out: Tensor = _Tiles.apply(kept, mlp, hidden.requires_grad, *trained)
    return out


class _Keep(torch.autograd.Function):
    """Returns the hidden states as they are, and saves them for `_Tiles`.

    torch's checkpoint ends a recompute with the last tensor that was saved in forward. A function's
    tensors are saved once it has run. A function of its own saves these before the tiles run, so
    where backward needs nothing after the layer's MLP, the recompute leaves the MLP out.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *trained: Tensor) -> Tensor:
        # `trained` makes torch save `hidden` where that needs no gradient itself.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        ctx.num_trained = len(trained)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (grads[0], *(None,) * ctx.num_trained)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, mlp: "_TiledMlp", wants_hidden: bool, *trained: Tensor
    ) -> Tensor:
        ctx.keeper, ctx.wants_hidden = kept.grad_fn, wants_hidden
        # Not by save_for_backward: a recompute would have to run up to here for them.
        ctx.trained, ctx.versions = trained, [tensor._version for tensor in trained]
        ctx.mlp, ctx.random = mlp, RandomState.now(kept.device)
        return mlp.run(kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if [tensor._version for tensor in ctx.trained] != ctx.versions:
            raise RuntimeError(
                "a parameter of an MLP in tiles was changed in place between forward and backward, "
                "so its gradient would be another one. Go backward before optimizer.step()."
            )
        (hidden,) = ctx.keeper.saved_tensors  # read once: torch's checkpoint gives them only once
        # Not the parameters themselves, whose hooks would run for each tile.
        stand_ins = [
            nn.Parameter(parameter.detach(), requires_grad=is_wanted)
            for parameter, is_wanted in zip(ctx.trained, ctx.needs_input_grad[3:], strict=True)
        ]

        def run_again(mlp: "_TiledMlp") -> tuple[Tensor | None, list[Tensor | None]]:
            with ctx.random.replayed(), _in_place_of(mlp.module, ctx.trained, stand_ins):
                return mlp.gradients(hidden, grad, ctx.wants_hidden, stand_ins)

        # Hooks may have been added since forward.
        mlp = ctx.mlp if is_plain(ctx.mlp.last) else replace(ctx.mlp, last=None)
        try:
            grad_hidden, grads = run_again(mlp)
        except _ResultIsUsedError:
            grad_hidden, grads = run_again(replace(mlp, last=None))
        return grad_hidden, None, None, *grads


class _ResultIsUsedError(Exception):
    """An MLP does not return its last layer's result as it is, so the result has to be computed."""


def _autocast_now(device_type: str) -> Callable[[], torch.autocast]:
    """A function that makes contexts like the present autocast, which autograd's threads lack.

    Tiles can't share cast weights, so their cache is off: forward casts them without gradients, and
    in backward they belong to a graph that is gone after the tile.
    """
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )


@dataclass(frozen=True)
class _TiledMlp:
    forward: Forward
    module: nn.Module
    num_tiles: int
    last: nn.Linear | None
    autocast: Callable[[], torch.autocast]

    def run(self, hidden: Tensor) -> Tensor:
        """Compute all tiles, with gradients enabled as the caller has them."""
        out: Tensor | None = None
        with self.autocast():
            for start, size in self._spans(hidden.shape[-2]):
                tile = self.forward(hidden.narrow(-2, start, size))
                if out is None:
                    out = tile.new_empty(*hidden.shape[:-1], tile.shape[-1])
                out.narrow(-2, start, size).copy_(tile)
        assert out is not None
        return out

    def gradients(
        self, hidden: Tensor, grad: Tensor, wants_hidden: bool, parameters: Sequence[Tensor]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the hidden states and of each parameter, in their dtypes.

        As in autograd, a parameter that had no part in the result has None.
        """
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        wanted = [number for number, p in enumerate(parameters) if p.requires_grad]
        totals: list[Tensor | None] = [None] * len(parameters)
        for start, size in self._spans(hidden.shape[-2]):
            tile = hidden.narrow(-2, start, size).detach().requires_grad_(wants_hidden)
            inputs = [*(parameters[number] for number in wanted), *([tile] if wants_hidden else [])]
            found = self._tile_gradients(tile, inputs, grad.narrow(-2, start, size))
            if grad_hidden is not None:
                of_tile, place = found.pop(), grad_hidden.narrow(-2, start, size)
                place.zero_() if of_tile is None else place.copy_(of_tile)
            for number in reversed(wanted):
                totals[number] = _sum(totals[number], found.pop())
        return grad_hidden, [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(totals, parameters, strict=True)
        ]

    def _tile_gradients(
        self, tile: Tensor, inputs: Sequence[Tensor], grad: Tensor
    ) -> list[Tensor | None]:
        with torch.enable_grad(), self.autocast(), left_out(self.last) as stood_in:
            out = self.forward(tile)
        if self.last is not None and not (len(stood_in) == 1 and stood_in[0] is out):
            raise _ResultIsUsedError
        _check_leaves(out, inputs)
        return list(torch.autograd.grad(out, inputs, grad, allow_unused=True))

    def _spans(self, length: int) -> Iterator[tuple[int, int]]:
        """Start and size of each tile."""
        for number in range(self.num_tiles):
            start = number * length // self.num_tiles
            yield start, (number + 1) * length // self.num_tiles - start


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add `grad` to `total` in place, in float32 or wider."""
    if grad is None:
        return total
    if total is None:
        # Not `grad` itself, which two parameters may share.
        total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)


def _check_leaves(out: Tensor, inputs: Sequence[Tensor]) -> None:
    """Refuse a tile's graph if it has other leaves than `inputs`."""
    known = {id(tensor) for tensor in inputs}
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"an MLP in tiles depends on a trained tensor {list(leaf.shape)} that is not among "
                "the MLP's own parameters, or was not when forward ran: its gradient would be "
                "lost. Use LongContextConfig(mlp_tiles=1)."
            )
        nodes += [next_node for next_node, _ in node.next_functions]


@contextmanager
def _in_place_of(
    module: nn.Module, parameters: Sequence[Tensor], stand_ins: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Put stand-ins wherever `module` and the modules inside hold the parameters."""
    by_id = {id(p): other for p, other in zip(parameters, stand_ins, strict=True)}
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if id(parameter) in by_id
    ]
    try:
        for owner, name, parameter in places:
            owner._parameters[name] = by_id[id(parameter)]
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter
