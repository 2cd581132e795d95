"""DeepSpeed-Ulysses: exchange heads for tokens around a plan over fewer ranks (Jacobs et al. 2023).

Before attention every rank of a Ulysses group holds all heads of some tokens; during attention it
holds some heads of all tokens. If there are fewer key-value heads than ranks, each is sent to every
rank whose query heads need it, and its gradients are summed in float32 on the ranks it came from.
Query heads need not divide evenly.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.accumulate import sum_dtype
from longctx_patch.engine.head_packing import HeadCuts, HeadTotal, are_shared, pack, unpack
from longctx_patch.plans.head_split import Heads, HeadSplit
from longctx_patch.transport import Pending, Transport


class Resharder(NamedTuple):
    """Exchanges heads for tokens in a Ulysses group.

    Every exchange is one all-to-all that carries all tensors it is given. They have one dtype and
    head dim, and travel side by side along the heads.
    """

    transport: Transport
    split: HeadSplit
    sizes: tuple[int, ...]
    """The number of tokens that each rank has before the exchange."""

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> "ArrivingHeads":
        """Begin to exchange tensors `[B, L_local, all heads, D]` for some heads of all tokens."""
        rank = self.transport.group_rank
        batch, _, _, dim = tensors[0].shape
        widths = [self.split.of(kind)[rank].size for kind in heads]
        shapes = [(batch, size, sum(widths), dim) for size in self.sizes]
        send, sizes = pack(tensors, tuple(self.split.of(kind) for kind in heads))
        return ArrivingHeads(self._all_to_all(send, sizes, shapes), widths)

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> "ArrivingTokens":
        """Begin the way back: exchange what `to_heads` brings for all heads of some tokens."""
        rank = self.transport.group_rank
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 2)
        batch, _, _, dim = whole.shape
        cuts = tuple(self.split.of(kind) for kind in heads)
        widths = [sum(cut.size for cut in mine) for mine in zip(*cuts, strict=True)]
        shapes = [(batch, self.sizes[rank], width, dim) for width in widths]
        # In a batch of one row, the tokens of each rank are contiguous already.
        send = whole.reshape(-1)
        if batch > 1:
            send = torch.cat([part.flatten() for part in whole.split(self.sizes, 1)])
        sizes = [batch * size * whole.shape[2] * dim for size in self.sizes]
        return ArrivingTokens(self._all_to_all(send, sizes, shapes), cuts)

    def _all_to_all(
        self, send: Tensor, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]
    ) -> "_Arriving":
        """Send `sizes[i]` numbers to rank `i` and get a tensor of `shapes[i]` from it."""
        width = send.dtype.itemsize
        arriving = [prod(shape) for shape in shapes]
        received = send.new_empty(sum(arriving))
        pending = self.transport.all_to_all(
            send.view(torch.uint8),
            [size * width for size in sizes],
            received.view(torch.uint8),
            [size * width for size in arriving],
        )
        return _Arriving(pending, received, tuple(shapes))


class _Arriving(NamedTuple):
    """Tensors from each rank, on their way into one buffer."""

    pending: Pending
    received: Tensor
    shapes: tuple[tuple[int, ...], ...]

    def wait(self) -> Tensor:
        """Wait, and return the buffer."""
        self.pending.wait()
        return self.received


class ArrivingHeads(NamedTuple):
    """Some heads of several tensors, on their way here with the tokens of all ranks."""

    arriving: _Arriving
    widths: Sequence[int]
    """The number of heads of each tensor."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait, and return `[B, L of the group, heads, D]` for each tensor."""
        received, shapes = self.arriving.wait(), self.arriving.shapes
        batch, _, heads, dim = shapes[0]
        # In a batch of one row, the tokens of all ranks are in order as they arrived.
        whole = received.view(1, -1, heads, dim)
        if batch > 1:
            parts = received.split([prod(shape) for shape in shapes])
            whole = torch.cat([p.view(shape) for p, shape in zip(parts, shapes, strict=True)], 1)
        return whole.split_with_sizes(self.widths, 2)


class ArrivingTokens(NamedTuple):
    """All heads of this rank's tokens, on their way here: each rank sends some of each tensor."""

    arriving: _Arriving
    cuts: tuple[HeadCuts, ...]
    """The heads that each rank sends, for each tensor."""


def join_tokens(exchanges: Sequence[ArrivingTokens]) -> list[Tensor]:
    """`[B, L, all heads, D]` of each tensor of exchanges that are on their way.

    Heads that several ranks have (key-value gradients) are summed in float32.
    """
    found = []
    for exchange in exchanges:
        totals = _empty_totals(exchange)
        unpack(exchange.arriving.wait(), totals, exchange.cuts)
        found += [total.tensor.to(exchange.arriving.received.dtype) for total in totals]
    return found


def _empty_totals(exchange: ArrivingTokens) -> list[HeadTotal]:
    """Memory for all heads of each tensor of an exchange."""
    like, (batch, rows, _, dim) = exchange.arriving.received, exchange.arriving.shapes[0]
    totals = []
    for cuts in exchange.cuts:
        shape = (batch, rows, max(cut.stop for cut in cuts), dim)
        is_sum = are_shared(cuts)
        tensor = (
            like.new_zeros(shape, dtype=sum_dtype(like.dtype)) if is_sum else like.new_empty(shape)
        )
        totals.append(HeadTotal(tensor, is_sum))
    return totals
