"""DeepSpeed-Ulysses: exchange heads for tokens around a plan over fewer ranks (Jacobs et al. 2023).

Before attention every rank of a Ulysses group holds some tokens of all heads, inside it all tokens
of some heads. Key-value heads fewer than ranks are sent to every rank whose query heads need them,
and their gradients are summed in float32 where they came from. Query heads need not divide evenly.

Heads don't depend on each other, so they are exchanged in waves: those of one wave travel while
another is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.accumulate import sum_dtype
from longctx_patch.layout import Interval, even_cuts
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import Pending, Transport


class Heads(Enum):
    """Which heads a tensor has."""

    QUERY = "query"
    KEY_VALUE = "key_value"


QKV = (Heads.QUERY, Heads.KEY_VALUE, Heads.KEY_VALUE)
"""What q, k and v have, in this order; so do their gradients."""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a Ulysses group computes, all at once or in one of several waves."""

    num_heads: int
    num_kv_heads: int
    degree: int
    wave: int = 0
    num_waves: int = 1

    def __post_init__(self) -> None:
        if self.num_heads < self.degree:
            raise ValueError(
                f"ulysses_degree={self.degree}, but the model has {self.num_heads} query heads and "
                f"each rank needs one. Use ulysses_degree <= {self.num_heads} and a larger "
                "ring_degree."
            )

    def in_waves(self, most: int) -> "tuple[HeadSplit, ...]":
        """The same heads, in as many parts as each rank has heads for, and at most `most`."""
        count = min(most, self.num_heads // self.degree) if self.degree > 1 else 1
        return tuple(replace(self, wave=wave, num_waves=count) for wave in range(count))

    @cached_property
    def query(self) -> tuple[Interval, ...]:
        """Query heads of each rank."""
        return tuple(self._of_wave(heads) for heads in even_cuts(self.num_heads, self.degree))

    def _of_wave(self, heads: Interval) -> Interval:
        """A part of a rank's query heads: those of whole key-value heads, if there are enough."""
        group = self.num_heads // self.num_kv_heads
        whole = heads.start % group == heads.stop % group == 0
        unit = group if whole and heads.size >= group * self.num_waves else 1
        part = even_cuts(heads.size // unit, self.num_waves)[self.wave]
        return Interval(heads.start + part.start * unit, heads.start + part.stop * unit)

    @cached_property
    def key_value(self) -> tuple[Interval, ...]:
        """Key-value heads that each rank's query heads need; ranks and waves may share some."""
        group = self.num_heads // self.num_kv_heads
        return tuple(Interval(q.start // group, (q.stop - 1) // group + 1) for q in self.query)

    def of(self, heads: Heads) -> tuple[Interval, ...]:
        return self.query if heads is Heads.QUERY else self.key_value

    def kv_runs(self, rank: int) -> tuple[Interval, ...] | None:
        """Local query heads of each local key-value head, or None where they group evenly."""
        group = self.num_heads // self.num_kv_heads
        q, kv = self.query[rank], self.key_value[rank]
        runs = tuple(
            q.intersect(Interval(head * group, (head + 1) * group)).shift(-q.start)
            for head in range(kv.start, kv.stop)
        )
        return None if len({run.size for run in runs}) == 1 else runs

    def num_kv_computed(self, rank: int) -> int:
        """Key-value heads that a rank's kernel sees."""
        return self.key_value[rank].size if self.kv_runs(rank) is None else self.query[rank].size


class HeadPart(NamedTuple):
    """Some heads of a tensor `[B, L, heads, D]`."""

    heads: Interval
    tensor: Tensor


class Resharder(NamedTuple):
    """Exchanges heads for tokens in a Ulysses group.

    Every exchange is one all-to-all that carries all tensors it is given. They have one dtype and
    head dim, and travel side by side along the heads.
    """

    transport: Transport
    split: HeadSplit
    sizes: tuple[int, ...]
    """Tokens of each rank before the exchange."""

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> "ArrivingHeads":
        """Begin: from `[B, L_local, all heads, D]` each to some heads of all ranks' tokens."""
        rank = self.transport.group_rank
        batch, _, _, dim = tensors[0].shape
        widths = [self.split.of(kind)[rank].size for kind in heads]
        shapes = [(batch, size, sum(widths), dim) for size in self.sizes]
        send, sizes = _packed_by_heads(tensors, [self.split.of(kind) for kind in heads])
        return ArrivingHeads(self._all_to_all(send, sizes, shapes), widths)

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> "ArrivingTokens":
        """Begin the way back: from what `to_heads` brings to parts of all heads."""
        rank = self.transport.group_rank
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 2)
        batch, _, _, dim = whole.shape
        cuts = list(zip(*(self.split.of(kind) for kind in heads), strict=True))
        shapes = [(batch, self.sizes[rank], sum(cut.size for cut in mine), dim) for mine in cuts]
        parts = whole.split(self.sizes, 1)
        # Of one row, the tokens of each rank lie side by side already.
        send = whole.reshape(-1) if batch == 1 else torch.cat([part.flatten() for part in parts])
        return ArrivingTokens(self._all_to_all(send, [p.numel() for p in parts], shapes), cuts)

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

    def wait(self) -> list[Tensor]:
        self.pending.wait()
        parts = self.received.split([prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class ArrivingHeads(NamedTuple):
    """The tokens of all ranks, for some heads of several tensors."""

    arriving: _Arriving
    widths: Sequence[int]
    """Heads of each tensor."""

    def wait(self) -> tuple[Tensor, ...]:
        """`[B, L of the group, heads, D]` each."""
        parts = self.arriving.wait()
        batch, _, heads, dim = parts[0].shape
        # Of one row, the tokens of the ranks lie side by side as they came.
        whole = (
            self.arriving.received.view(1, -1, heads, dim) if batch == 1 else torch.cat(parts, 1)
        )
        return whole.split(self.widths, 2)


class ArrivingTokens(NamedTuple):
    """This rank's tokens, some heads of several tensors from each rank."""

    arriving: _Arriving
    cuts: Sequence[tuple[Interval, ...]]
    """From each rank, the heads of each tensor."""

    def wait(self) -> list[list[HeadPart]]:
        """Of each tensor, the parts that came from the ranks."""
        parts = [
            [
                HeadPart(*pair)
                for pair in zip(cuts, part.split([c.size for c in cuts], 2), strict=True)
            ]
            for part, cuts in zip(self.arriving.wait(), self.cuts, strict=True)
        ]
        return [list(of_tensor) for of_tensor in zip(*parts, strict=True)]


def _packed_by_heads(
    tensors: Sequence[Tensor], cuts: Sequence[tuple[Interval, ...]]
) -> tuple[Tensor, list[int]]:
    """(flat buffer, numbers for each rank): each rank's heads of all tensors, side by side."""
    batch, tokens, _, dim = tensors[0].shape
    widths = [sum(cut.size for cut in of_rank) for of_rank in zip(*cuts, strict=True)]
    sizes = [batch * tokens * width * dim for width in widths]
    buffer = tensors[0].new_empty(sum(sizes))
    segments = [
        part.view(batch, tokens, width, dim)
        for part, width in zip(buffer.split(sizes), widths, strict=True)
    ]
    first = [0] * len(widths)
    for tensor, of_tensor in zip(tensors, cuts, strict=True):
        for rank, cut in enumerate(of_tensor):
            place = segments[rank].narrow(2, first[rank], cut.size)
            place.copy_(tensor.narrow(2, cut.start, cut.size))
            first[rank] += cut.size
    return buffer, sizes


def join_heads(parts: Sequence[HeadPart]) -> Tensor:
    """All heads; what several parts have of one (key-value gradients) is summed in float32."""
    parts = sorted(parts, key=lambda part: part.heads)
    if all(a.heads.stop == b.heads.start for a, b in pairwise(parts)):
        return torch.cat([part.tensor for part in parts], 2)
    batch, rows, _, dim = parts[0].tensor.shape
    dtype = parts[0].tensor.dtype
    shape = (batch, rows, max(part.heads.stop for part in parts), dim)
    total = parts[0].tensor.new_zeros(shape, dtype=sum_dtype(dtype))
    for heads, tensor in parts:
        total[:, :, heads.start : heads.stop] += tensor
    return total.to(dtype)


def to_heads_traffic(
    split: HeadSplit, heads: Sequence[Heads], rank: int, *, tokens: int, bytes_per_head: int
) -> Traffic:
    """What one rank sends in `to_heads`, for its `tokens` and the bytes of a token's head."""
    sizes = [
        tokens * bytes_per_head * sum(split.of(kind)[other].size for kind in heads)
        for other in range(split.degree)
        if other != rank
    ]
    return _total(sizes)


def to_tokens_traffic(
    split: HeadSplit,
    heads: Sequence[Heads],
    rank: int,
    *,
    sizes: Sequence[int],
    bytes_per_head: int,
) -> Traffic:
    """What one rank sends in `to_tokens`; `sizes` are the tokens of each rank."""
    mine = sum(split.of(kind)[rank].size for kind in heads)
    return _total(
        [size * bytes_per_head * mine for other, size in enumerate(sizes) if other != rank]
    )


def _total(sizes: Sequence[int]) -> Traffic:
    return Traffic(sum(1 for size in sizes if size), sum(sizes))
