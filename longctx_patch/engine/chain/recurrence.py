"""A recurrence over the segments of a chain: exact, with one exchange of small maps per layer.

A segment that begins its document runs from a state of zero, and hands on the state it ends with.
Another one must know the state before it: each hands on its map S -> M S + U, found from its own
tokens alone, and composes the maps before it. Then all segments run once, each from its state. The
states that travel have the same size however long the segments are. Documents that lie whole on a
rank run in one call, where the kernel keeps them apart itself.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor

from longctx_patch.engine.chain.chain_run import ChainRun
from longctx_patch.engine.chain.hand_over import hand_over
from longctx_patch.plans.chain import Chain
from longctx_patch.plans.recurrent import RecurrentShape
from longctx_patch.sequence.layout import Interval


class Recurrence(Protocol):
    """A layer's recurrence over this rank's tokens."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors by token that its results depend on, without the state: `[B, L, ...]` each."""
        ...

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The other tensors that its results depend on and that may have a gradient."""
        ...

    @property
    def map_shape(self) -> tuple[int, ...]:
        """Shape of M as it travels."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> RecurrentShape:
        """Its sizes, in which its inputs and their heads are told apart."""
        ...

    def with_inputs(self, inputs: Sequence[Tensor]) -> Self:
        """The same recurrence over other inputs."""
        ...

    def of_heads(self, inputs: Sequence[Tensor], heads: Interval) -> Self:
        """The recurrence of some heads, over inputs that have these alone."""
        ...

    def run(
        self, slots: Interval, state: Tensor | None, *, ends: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(output `[B, tokens, ...]`, the state that is left, if `ends`) of some of the tokens."""
        ...

    def run_documents(self, edges: Sequence[int]) -> Tensor | None:
        """Output of documents that follow one another, each from a state of zero, in one call; None
        where the kernel takes one at a time.

        `edges`: where each begins, and the end of the last one.
        """
        ...

    def map(self, slots: Interval) -> tuple[Tensor, Tensor]:
        """(M, U) of some of the tokens."""
        ...

    def apply(self, m: Tensor, state: Tensor) -> Tensor:
        """M S."""
        ...


def run_recurrence(run: ChainRun, recurrence: Recurrence) -> Tensor:
    """The output `[B, L, ...]` for this rank's tokens, each document from a state of zero or
    from the one at its parent's end.

    Collective over ranks that share documents.
    """
    chain, needs = run.chain, run.chain.states
    runs = chain.runs(run.rank)
    begun, items = _begin(chain, runs, recurrence)
    inputs, weights = recurrence.inputs, recurrence.weights
    learns = any(tensor.requires_grad for tensor in (*inputs, *weights))
    exchange = run.exchange(needs, _sizes(chain, recurrence), _dtype(recurrence), learns=learns)
    foreign, passed = hand_over(exchange, items, (*inputs, *begun.values(), *weights))
    outputs = dict(zip(begun, passed[len(inputs) :], strict=False))
    rest, items = recurrence.with_inputs(passed[: len(inputs)]), items | foreign
    for numbers in runs:
        if numbers not in outputs:
            (number,) = numbers
            state = _state(rest, [items[other] for other in needs[number]])
            outputs[numbers], _ = rest.run(chain.segments[number].slots, state, ends=False)
    parts = [outputs[numbers] for numbers in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


Runs = Sequence[tuple[int, ...]]
"""Segments of a rank: see `Chain.runs`."""


def _begin(
    chain: Chain, runs: Runs, recurrence: Recurrence
) -> tuple[dict[tuple[int, ...], Tensor], dict[int, Tensor]]:
    """(outputs of this rank's segments that begin a document, items of all that others need)."""
    outputs: dict[tuple[int, ...], Tensor] = {}
    items: dict[int, Tensor] = {}
    dtype = _dtype(recurrence)  # transformers' functions leave float32, whatever the model's is
    for numbers in runs:
        slots = [chain.segments[number].slots for number in numbers]
        if len(numbers) > 1:
            outputs[numbers] = _whole(recurrence, slots)
            continue
        (number,), is_needed = numbers, numbers[0] in chain.needed
        if chain.segments[number].begins:
            outputs[numbers], state = recurrence.run(slots[0], None, ends=is_needed)
            if state is not None:
                items[number] = state.flatten().to(dtype)
        elif is_needed:
            parts = [part.flatten() for part in recurrence.map(slots[0])]
            items[number] = torch.cat(parts).to(dtype)
    return outputs, items


def _whole(recurrence: Recurrence, slots: Sequence[Interval]) -> Tensor:
    """Output of whole documents that follow one another."""
    out = recurrence.run_documents([*(each.start for each in slots), slots[-1].stop])
    if out is None:
        out = torch.cat([recurrence.run(each, None, ends=False)[0] for each in slots], dim=1)
    return out


def _sizes(chain: Chain, recurrence: Recurrence) -> dict[int, int]:
    """Numbers in each segment's item; of one that begins its document only U travels."""
    u, m = prod(recurrence.state_shape), prod(recurrence.map_shape)
    return {n: u if segment.begins else m + u for n, segment in enumerate(chain.segments)}


def _state(recurrence: Recurrence, items: Sequence[Tensor]) -> Tensor:
    """The state after the segments of these items, of which the first begins the document."""
    shape, size = recurrence.state_shape, prod(recurrence.map_shape)
    state = items[0].view(shape)
    for item in items[1:]:
        m, u = item[:size].view(recurrence.map_shape), item[size:].view(shape)
        state = recurrence.apply(m, state) + u
    return state


def _dtype(recurrence: Recurrence) -> torch.dtype:
    """The dtype of states: float32, or wider where the model is."""
    return torch.promote_types(recurrence.inputs[0].dtype, torch.float32)
