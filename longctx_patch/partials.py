"""Partial results of one rank: its own, and those it holds for others until they are sent home."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from longctx_patch.accumulate import RowSum, SoftmaxMerge, sum_dtype
from longctx_patch.layout import Interval
from longctx_patch.plans import Operand, Transfer
from longctx_patch.transport import Packet, TensorSpec


class Partial(Protocol):
    """A partial result for some rows of one owner."""

    rows: Interval

    def add(self, rows: Interval, parts: tuple[Tensor, ...]) -> None:
        """Add results for `rows` of the owner."""
        ...

    def parts(self) -> tuple[Tensor, ...]:
        """What another partial result can add, rows along dim 1."""
        ...

    def packet(self, operand: Operand) -> Packet:
        """The bytes to send."""
        ...


class OutPartial:
    """Attention output and lse; parts are (lse_BLH, out_BLHD)."""

    def __init__(self, rows: Interval, like: tuple[Tensor, ...]) -> None:
        (q,) = like
        self.rows = rows
        self._merge = SoftmaxMerge(_spec(q, rows, q.dtype), q.device)

    def add(self, rows: Interval, parts: tuple[Tensor, ...]) -> None:
        lse_BLH, out = parts
        self._merge.add(rows.shift(-self.rows.start), out, lse_BLH.transpose(1, 2))

    def parts(self) -> tuple[Tensor, ...]:
        out, lse_BHL = self._merge.result()
        return lse_BHL.transpose(1, 2), out

    def packet(self, operand: Operand) -> Packet:
        return Packet.pack(self.parts())


class GradientPartial:
    """Sums of gradients, one for each tensor of `like`."""

    def __init__(self, rows: Interval, like: tuple[Tensor, ...]) -> None:
        self.rows = rows
        self._sums = [RowSum(_spec(t, rows, t.dtype), t.device) for t in like]

    def add(self, rows: Interval, parts: tuple[Tensor, ...]) -> None:
        for total, part in zip(self._sums, parts, strict=True):
            total.add(rows.shift(-self.rows.start), part)

    def parts(self) -> tuple[Tensor, ...]:
        return tuple(total.total for total in self._sums)

    def results(self) -> tuple[Tensor, ...]:
        return tuple(total.result() for total in self._sums)

    def packet(self, operand: Operand) -> Packet:
        if operand.is_sum:
            return Packet.pack([part.to(sum_dtype(part.dtype)) for part in self.parts()])
        return Packet.pack(self.results())


class Partials:
    """All partial results that one rank holds, by (kind, owner)."""

    def __init__(self, rank: int, like: Mapping[Operand, tuple[Tensor, ...]]) -> None:
        """`like`: for each kind of result the rank's own tensors whose shapes it has."""
        self._rank = rank
        self._like = like
        self._held: dict[tuple[Operand, int], Partial] = {
            (kind, rank): self._make(kind, Interval(0, tensors[0].shape[1]))
            for kind, tensors in like.items()
        }
        self._arriving: list[tuple[Transfer, Packet]] = []

    def add(self, kind: Operand, owner: int, rows: Interval, parts: tuple[Tensor, ...]) -> None:
        """Add results for `rows` of `owner`."""
        held = self._held.get((kind, owner))
        if held is None or not _covers(held.rows, rows):
            held = self._grown(kind, owner, held, rows)
        held.add(rows, parts)

    def own(self, kind: Operand) -> Partial:
        return self._held[kind, self._rank]

    def outgoing(self, transfer: Transfer) -> Tensor:
        """Give up the partial result."""
        kind, owner, rows = transfer.block.operand.partial, *transfer.block[1:]
        held = self._held[kind, owner]
        if held.rows != rows:
            held = self._grown(kind, owner, held, rows)
        del self._held[kind, owner]
        return held.packet(transfer.block.operand).buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        operand, _, rows = transfer.block
        like = self._like[operand.partial]
        specs = [_spec(t, rows, sum_dtype(t.dtype) if operand.is_sum else t.dtype) for t in like]
        if operand is Operand.OUT:
            (out,) = specs
            specs = [TensorSpec(out.shape[:3], sum_dtype(out.dtype)), out]
        packet = Packet.empty(specs, like[0].device)
        self._arriving.append((transfer, packet))
        return packet.buffer

    def land(self) -> None:
        """Add what has arrived."""
        for transfer, packet in self._arriving:
            operand, owner, rows = transfer.block
            held = self._held.get((operand.partial, owner))
            if owner != self._rank and held is not None:
                # The packet is the larger part and ours to write to: add the smaller to it.
                self._held.pop((operand.partial, owner))
                self.add(operand.partial, owner, rows, packet.tensors)
                self.add(operand.partial, owner, held.rows, held.parts())
            else:
                self.add(operand.partial, owner, rows, packet.tensors)
        self._arriving.clear()

    def _grown(self, kind: Operand, owner: int, held: Partial | None, rows: Interval) -> Partial:
        """A partial result over `rows` and what was held, in place of it."""
        if held is not None:
            rows = Interval(min(rows.start, held.rows.start), max(rows.stop, held.rows.stop))
        larger = self._make(kind, rows)
        if held is not None:
            larger.add(held.rows, held.parts())
        self._held[kind, owner] = larger
        return larger

    def _make(self, kind: Operand, rows: Interval) -> Partial:
        make = OutPartial if kind is Operand.OUT else GradientPartial
        return make(rows, self._like[kind])


def _covers(outer: Interval, inner: Interval) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _spec(like: Tensor, rows: Interval, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec((like.shape[0], rows.size, *like.shape[2:]), dtype)
