"""Partial results of one rank: its own, and those it holds for others until they are sent home."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longctx_patch.accumulate import RowSum, SoftmaxMerge, sum_dtype
from longctx_patch.layout import Interval
from longctx_patch.plans import Block, Operand, Share, Transfer
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

    def adopt(self, packet: Packet) -> None:
        """Start from a packet that covers all rows, and is ours to write to."""
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

    def adopt(self, packet: Packet) -> None:
        self.add(self.rows, packet.tensors)

    def packet(self, operand: Operand) -> Packet:
        return Packet.pack(self.parts())


class GradientPartial:
    """Sums of gradients, one for each tensor of `like`."""

    def __init__(self, rows: Interval, like: tuple[Tensor, ...]) -> None:
        self.rows = rows
        self._sums = [RowSum(_spec(t, rows, t.dtype), t.device) for t in like]
        self._arrived: Packet | None = None

    def add(self, rows: Interval, parts: tuple[Tensor, ...]) -> None:
        for total, part in zip(self._sums, parts, strict=True):
            total.add(rows.shift(-self.rows.start), part)

    def parts(self) -> tuple[Tensor, ...]:
        return tuple(total.total for total in self._sums)

    def adopt(self, packet: Packet) -> None:
        self.add(self.rows, packet.tensors)
        self._arrived = packet

    def packet(self, operand: Operand) -> Packet:
        parts = self.parts()
        dtypes = [sum_dtype(t.spec.dtype) if operand.is_sum else t.spec.dtype for t in self._sums]
        # A sum that came as a packet and was added to in place goes on as that packet.
        if self._arrived is not None and all(
            part is view and part.dtype == dtype
            for part, view, dtype in zip(parts, self._arrived.tensors, dtypes, strict=True)
        ):
            return self._arrived
        return Packet.pack(parts, dtypes)


class _Key(NamedTuple):
    """Whose result it is."""

    kind: Operand
    owner: int
    heads: Share


class Partials:
    """All partial results that one rank holds; heads are along dim 2 of every tensor."""

    def __init__(
        self, rank: int, num_kv_heads: int, like: Mapping[Operand, tuple[Tensor, ...]]
    ) -> None:
        """`like`: for each kind of result the rank's own tensors whose shapes it has."""
        self._rank = rank
        self._num_kv_heads = num_kv_heads
        self._like = like
        self._held: dict[_Key, Partial] = {}
        self._arriving: list[tuple[Transfer, Packet]] = []

    def add(self, block: Block, parts: tuple[Tensor, ...]) -> None:
        """Add results for the rows of a block."""
        key = _key(block)
        # This rank's own results are of all its rows from the start: most works fill them.
        own = block.owner == self._rank
        rows = Interval(0, self._like[key.kind][0].shape[1]) if own else block.rows
        held = self._held.get(key)
        if held is None or not _covers(held.rows, rows):
            held = self._grown(key, held, rows)
        held.add(block.rows, parts)

    def own(self, kind: Operand, num_groups: int) -> tuple[Tensor, ...]:
        """This rank's results, its groups of heads side by side; zeros where nothing was added."""
        groups = []
        for index in range(num_groups):
            key = _Key(kind, self._rank, Share(index, num_groups))
            rows = Interval(0, self._like[kind][0].shape[1])
            groups.append((self._held.get(key) or self._make(key, rows)).parts())
        if num_groups == 1:
            return groups[0]
        return tuple(torch.cat(parts, 2) for parts in zip(*groups, strict=True))

    def outgoing(self, transfer: Transfer) -> Tensor:
        """Give up the partial result."""
        key, rows = _key(transfer.block), transfer.block.rows
        held = self._held[key]
        if held.rows != rows:
            held = self._grown(key, held, rows)
        del self._held[key]
        return held.packet(transfer.block.operand).buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        operand, _, rows, heads = transfer.block
        like = self._like_part(operand.partial, heads)
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
            block, key = transfer.block, _key(transfer.block)
            if block.owner == self._rank:
                self.add(block, packet.tensors)
                continue
            # The packet is the larger part: what is held is added to it.
            held = self._held.pop(key, None)
            self._held[key] = self._make(key, block.rows)
            self._held[key].adopt(packet)
            if held is not None:
                self.add(block._replace(rows=held.rows), held.parts())
        self._arriving.clear()

    def _grown(self, key: _Key, held: Partial | None, rows: Interval) -> Partial:
        """A partial result over `rows` and what was held, in place of it."""
        if held is not None:
            rows = Interval(min(rows.start, held.rows.start), max(rows.stop, held.rows.stop))
        larger = self._make(key, rows)
        if held is not None:
            larger.add(held.rows, held.parts())
        self._held[key] = larger
        return larger

    def _make(self, key: _Key, rows: Interval) -> Partial:
        make = OutPartial if key.kind is Operand.OUT else GradientPartial
        return make(rows, self._like_part(key.kind, key.heads))

    def _like_part(self, kind: Operand, heads: Share) -> tuple[Tensor, ...]:
        return tuple(heads.cut(tensor, self._num_kv_heads) for tensor in self._like[kind])


def _key(block: Block) -> _Key:
    return _Key(block.operand.partial, block.owner, block.heads)


def _covers(outer: Interval, inner: Interval) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _spec(like: Tensor, rows: Interval, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec((like.shape[0], rows.size, *like.shape[2:]), dtype)
