"""One exchange between recurrent layers' segments: each gets items of segments before it.

Backward hands the items' gradients back, so that autograd sums what one process would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx_patch.plans.chain import Chain, Needs
from longctx_patch.transport import Message, Transport


@dataclass(frozen=True)
class Exchange:
    """Who needs what of whom in one exchange, as one rank sees it."""

    chain: Chain
    needs: Needs
    transport: Transport
    sizes: Mapping[int, int]
    """How many numbers the item of each segment has, for those that travel."""
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.transport.group_rank

    def sent_to(self, rank: int) -> tuple[int, ...]:
        """The segments whose items this rank sends to another one."""
        return self.chain.wanted(self.needs, self.rank, rank)

    def got_from(self, rank: int) -> tuple[int, ...]:
        return self.chain.wanted(self.needs, rank, self.rank)

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
        device = tensors[0].device
        sends = [(rank, exchange.sent_to(rank)) for rank in exchange.others]
        gets = [(rank, exchange.got_from(rank)) for rank in exchange.others]
        found = _exchanged(exchange, own, sends, gets, device)
        foreign = {number: item for _, items in found for number, item in items.items()}
        return (*(foreign[number] for number in exchange.foreign), *tensors[len(own) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        foreign = dict(zip(exchange.foreign, gradients, strict=False))
        passed = gradients[len(foreign) :]
        # By the way the items came, and from all that got an item.
        sends = [(rank, exchange.got_from(rank)) for rank in exchange.others]
        gets = [(rank, exchange.sent_to(rank)) for rank in exchange.others]
        found = _exchanged(exchange, foreign, sends, gets, gradients[0].device)
        own: dict[int, Tensor] = {}
        for _, items in found:  # by rank, so that sums are the same in every run
            for number, gradient in items.items():
                own[number] = own[number] + gradient if number in own else gradient
        return (None, *(own[number] for number in exchange.own), *passed)


def _exchanged(
    exchange: Exchange,
    held: Mapping[int, Tensor],
    sends: Sequence[tuple[int, tuple[int, ...]]],
    gets: Sequence[tuple[int, tuple[int, ...]]],
    device: torch.device,
) -> list[tuple[int, dict[int, Tensor]]]:
    """Send items `[n]` by rank and receive others: (rank, items by segment), in rank order."""
    sent = [
        Message(rank, torch.cat([held[number] for number in numbers]))
        for rank, numbers in sends
        if numbers
    ]
    received = {
        rank: torch.empty(
            sum(exchange.sizes[number] for number in numbers), dtype=exchange.dtype, device=device
        )
        for rank, numbers in gets
        if numbers
    }
    exchange.transport.exchange(sent, [Message(*item) for item in received.items()]).wait()
    return [
        (rank, dict(zip(numbers, _split(received[rank], numbers, exchange.sizes), strict=True)))
        for rank, numbers in gets
        if numbers
    ]


def _split(message: Tensor, numbers: Sequence[int], sizes: Mapping[int, int]) -> tuple[Tensor, ...]:
    return message.split([sizes[number] for number in numbers])
