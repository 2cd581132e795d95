"""DeepSpeed-Ulysses: exchange heads for tokens around a plan over fewer ranks (Jacobs et al. 2023).

Before attention every rank of a Ulysses group holds some tokens of all heads, inside it all tokens
of some heads. Key-value heads fewer than ranks are sent to every rank whose query heads need them,
and their gradients are summed in float32 where they came from. Query heads need not divide evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from longctx_patch.accumulate import sum_dtype
from longctx_patch.layout import Interval, even_cuts
from longctx_patch.plans.traffic import Traffic
from longctx_patch.transport import Packet, TensorSpec, Transport


class Heads(Enum):
    """Which heads a tensor has."""

    QUERY = "query"
    KEY_VALUE = "key_value"


QKV = (Heads.QUERY, Heads.KEY_VALUE, Heads.KEY_VALUE)
"""What q, k and v have, in this order; so do their gradients."""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a Ulysses group computes."""

    num_heads: int
    num_kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        if self.num_heads < self.degree:
            raise ValueError(
                f"ulysses_degree={self.degree}, but the model has {self.num_heads} query heads and "
                f"each rank needs one. Use ulysses_degree <= {self.num_heads} and a larger "
                "ring_degree."
            )

    @cached_property
    def query(self) -> tuple[Interval, ...]:
        """Query heads of each rank."""
        return tuple(even_cuts(self.num_heads, self.degree))

    @cached_property
    def key_value(self) -> tuple[Interval, ...]:
        """Key-value heads that each rank's query heads attend to; ranks may share some."""
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


@dataclass(frozen=True)
class Resharder:
    """Exchanges heads for tokens in a Ulysses group.

    `sizes` are the tokens of each rank before the exchange. Every exchange is one all-to-all that
    carries all tensors it is given.
    """

    transport: Transport
    split: HeadSplit
    sizes: tuple[int, ...]

    @property
    def _rank(self) -> int:
        return self.transport.group_rank

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """`[B, L_local, all heads, D]` each -> `[B, L of the group, this rank's heads, D]`."""
        sends = [
            [x[:, :, slice(*self.split.of(kind)[rank])] for x, kind in self._pairs(tensors, heads)]
            for rank in range(self.transport.num_ranks)
        ]
        shapes = [
            [
                (x.shape[0], size, self.split.of(kind)[self._rank].size, x.shape[3])
                for x, kind in self._pairs(tensors, heads)
            ]
            for size in self.sizes
        ]
        arrived = self._all_to_all(sends, shapes)
        return [torch.cat(parts, 1) for parts in zip(*arrived, strict=True)]

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """The inverse; what several ranks hold of one head (key-value gradients) is summed."""
        rows = [
            Interval(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
            for rank in range(self.transport.num_ranks)
        ]
        sends = [[x[:, cut.start : cut.stop] for x in tensors] for cut in rows]
        shapes = [
            [
                (x.shape[0], self.sizes[self._rank], self.split.of(kind)[rank].size, x.shape[3])
                for x, kind in self._pairs(tensors, heads)
            ]
            for rank in range(self.transport.num_ranks)
        ]
        arrived = self._all_to_all(sends, shapes)
        return [
            _join_heads(parts, self.split.of(kind))
            for parts, kind in zip(zip(*arrived, strict=True), heads, strict=True)
        ]

    def _pairs(
        self, tensors: Sequence[Tensor], heads: Sequence[Heads]
    ) -> list[tuple[Tensor, Heads]]:
        return list(zip(tensors, heads, strict=True))

    def _all_to_all(
        self, sends: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[tuple[Tensor, ...]]:
        """Send `sends[i]` to rank `i`; the tensors of these shapes that rank `i` sent, by rank."""
        dtypes = [tensor.dtype for tensor in sends[0]]
        device = sends[0][0].device
        out, packets = Packet.carve(
            [[TensorSpec(tuple(t.shape), t.dtype) for t in part] for part in sends], device
        )
        for packet, part in zip(packets, sends, strict=True):
            for view, tensor in zip(packet.tensors, part, strict=True):
                view.copy_(tensor)
        received, arrivals = Packet.carve(
            [[TensorSpec(*pair) for pair in zip(s, dtypes, strict=True)] for s in shapes], device
        )
        self.transport.all_to_all(
            out,
            [packet.buffer.numel() for packet in packets],
            received,
            [packet.buffer.numel() for packet in arrivals],
        )
        return [packet.tensors for packet in arrivals]


def _join_heads(parts: Sequence[Tensor], heads: Sequence[Interval]) -> Tensor:
    """Put each rank's heads in place; add up in float32 where ranks overlap."""
    if all(a.stop == b.start for a, b in pairwise(heads)):
        return torch.cat(list(parts), 2)
    batch, rows, _, dim = parts[0].shape
    shape = (batch, rows, heads[-1].stop, dim)
    total = parts[0].new_zeros(shape, dtype=sum_dtype(parts[0].dtype))
    for part, where in zip(parts, heads, strict=True):
        total[:, :, slice(where.start, where.stop)] += part
    return total.to(parts[0].dtype)


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
