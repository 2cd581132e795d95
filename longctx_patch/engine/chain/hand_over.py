"""One exchange between recurrent layers' segments: each gets items of segments before it.

Backward hands the items' gradients back, so that autograd sums what one process would. Inside a
checkpointed region that keeps attention, what came is kept too, unless it is large. The recompute
then neither sends nor waits. It still makes the rank's own items, which backward has gradients of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.memory.replay import current_frame
from longctx_patch.plans.chain import Chain, Needs
from longctx_patch.transport import Message, Transport


@dataclass(frozen=True)
class Exchange:
    """Who needs what of whom in one exchange, as one rank sees it."""

    chain: Chain
    needs: Needs
    transport: Transport
    sizes: Mapping[int, int]
    """The numbers of each segment's item, for those that travel."""
    dtype: torch.dtype
    is_kept: bool
    """True if a checkpointed region that keeps attention keeps the items of others."""

    @property
    def rank(self) -> int:
        return self.transport.group_rank

    def sent_to(self, rank: int) -> tuple[int, ...]:
        """The segments whose items this rank sends to another one."""
        return self._sent[rank]

    def got_from(self, rank: int) -> tuple[int, ...]:
        return self._got[rank]

    @cached_property
    def _sent(self) -> dict[int, tuple[int, ...]]:
        return {other: self.chain.wanted(self.needs, self.rank, other) for other in self.others}

    @cached_property
    def _got(self) -> dict[int, tuple[int, ...]]:
        return {other: self.chain.wanted(self.needs, other, self.rank) for other in self.others}

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.chain.num_ranks) if rank != self.rank]

    @property
    def own(self) -> list[int]:
        """The segments of this rank that others need."""
        return sorted({number for rank in self.others for number in self.sent_to(rank)})

    @property
    def foreign(self) -> list[int]:
        """The segments of others that this rank needs."""
        return sorted(number for rank in self.others for number in self.got_from(rank))


def hand_over(
    exchange: Exchange, items: Mapping[int, Tensor], passed: Sequence[Tensor]
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Give this rank's items to those that need them, and get theirs.

    Args:
        items: of this rank's segments that others need, each `[n]`, all of one dtype.
        passed: tensors of this rank that everything it computes afterwards depends on, or is.
            They are returned as they are; since they pass through the exchange, backward runs it
            on every rank, also on one that gets nothing, and at one place of its program.

    Returns:
        Items of other ranks' segments, by their numbers, and `passed`.
    """
    if not exchange.own and not exchange.foreign:
        return {}, list(passed)
    own = [items[number] for number in exchange.own]
    found = _HandOver.apply(exchange, *own, *passed)
    foreign = exchange.foreign
    return dict(zip(foreign, found, strict=False)), list(found[len(foreign) :])


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        own = dict(zip(exchange.own, tensors, strict=False))
        gets = _gets(exchange)
        messages = _came(exchange, own, gets, tensors[0].device)
        foreign: dict[int, Tensor] = {}
        for items in _items(messages, gets, exchange.sizes):
            foreign |= items
        return (*(foreign[number] for number in exchange.foreign), *tensors[len(own) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        foreign = dict(zip(exchange.foreign, gradients, strict=False))
        passed = gradients[len(foreign) :]
        # By the way the items came, and from all that got an item.
        sends, gets = _gets(exchange), _sends(exchange)
        messages = _exchanged(exchange, foreign, sends, gets, gradients[0].device)
        own: dict[int, Tensor] = {}
        for items in _items(messages, gets, exchange.sizes):  # so that sums are always the same
            for number, gradient in items.items():
                own[number] = own[number] + gradient if number in own else gradient
        return (None, *(own[number] for number in exchange.own), *passed)


Numbers = list[tuple[int, tuple[int, ...]]]
"""The segments whose items are in the message to or from each rank that has one, in rank order."""


def _sends(exchange: Exchange) -> Numbers:
    found = [(rank, exchange.sent_to(rank)) for rank in exchange.others]
    return [(rank, numbers) for rank, numbers in found if numbers]


def _gets(exchange: Exchange) -> Numbers:
    found = [(rank, exchange.got_from(rank)) for rank in exchange.others]
    return [(rank, numbers) for rank, numbers in found if numbers]


def _came(
    exchange: Exchange, own: Mapping[int, Tensor], gets: Numbers, device: torch.device
) -> Sequence[Tensor]:
    """The messages of others: exchanged at first, and taken from the frame in a replay.

    A rank that gets nothing keeps nothing in its place, so that frames count alike on all ranks.
    """
    frame = current_frame() if exchange.is_kept else None
    if frame is not None and frame.replaying:
        return frame.take()
    messages = _exchanged(exchange, own, _sends(exchange), gets, device)
    if frame is not None:
        frame.keep(*messages)
    return messages


def _exchanged(
    exchange: Exchange,
    held: Mapping[int, Tensor],
    sends: Numbers,
    gets: Numbers,
    device: torch.device,
) -> list[Tensor]:
    """Send items `[n]` by rank, and return the message of each rank that is to send any."""
    sent = [
        Message(rank, torch.cat([held[number] for number in numbers])) for rank, numbers in sends
    ]
    sizes = [sum(exchange.sizes[number] for number in numbers) for _, numbers in gets]
    received = [torch.empty(size, dtype=exchange.dtype, device=device) for size in sizes]
    ranks = [rank for rank, _ in gets]
    exchange.transport.exchange(sent, list(map(Message, ranks, received))).wait()
    return received


def _items(
    messages: Sequence[Tensor], gets: Numbers, sizes: Mapping[int, int]
) -> list[dict[int, Tensor]]:
    """The items of each message, by the numbers of their segments."""
    return [
        dict(zip(numbers, message.split([sizes[number] for number in numbers]), strict=True))
        for message, (_, numbers) in zip(messages, gets, strict=True)
    ]
