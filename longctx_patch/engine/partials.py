"""Partial results of one rank: its own, and those it holds for others until they are sent home."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.engine.accumulate import (
    RowSum,
    RowTotals,
    SoftmaxMerge,
    out_specs,
    sum_dtype,
)
from longctx_patch.engine.operands import adjoined
from longctx_patch.plans import Block, Operand, Share, Transfer
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.transport import Packet, TensorSpec


class Partial:
    """A partial result for some rows of one owner."""

    def __init__(self, rows: Rows, totals: RowTotals) -> None:
        self.rows = rows
        self.totals = totals
        self._arrived: Packet | None = None

    def add(self, runs: Sequence[Interval], parts: tuple[Tensor, ...]) -> None:
        """Add results for `runs` of the owner's rows, which the parts hold one after another."""
        for place, placed in _placed(self.rows, runs, parts):
            self.totals.add(place, placed)

    def adopt(self, packet: Packet) -> None:
        """Start from a packet that covers all rows and may be written to."""
        self.add(self.rows.runs, packet.tensors)
        self._arrived = packet

    def packet(self, operand: Operand) -> Packet:
        """The packet to send."""
        specs = [_wire_spec(spec, operand) for spec in self.totals.specs]
        # A sum that arrived as a packet and was added to in place is sent on as that packet.
        if (
            self._arrived is not None
            and self.totals.is_in(self._arrived.tensors)
            and [view.dtype for view in self._arrived.tensors] == [spec.dtype for spec in specs]
        ):
            return self._arrived
        packet = Packet.empty(specs, self.totals.device)
        self.totals.write_to(packet.tensors)
        return packet


class ResultKey(NamedTuple):
    """The identity of a result: its operand, its owner, and its heads."""

    kind: Operand
    owner: int
    heads: Share


class Partials:
    """All partial results that one rank holds; heads are along dim 2 of every tensor."""

    def __init__(
        self, rank: int, num_kv_heads: int, like: Mapping[Operand, tuple[Tensor, ...]]
    ) -> None:
        """`like`: for each kind of result, this rank's own tensors that have its shapes."""
        self._rank = rank
        self._num_kv_heads = num_kv_heads
        self._like = like
        self._held: dict[ResultKey, Partial] = {}
        self._arriving: list[tuple[Transfer, Packet]] = []

    def add(self, key: ResultKey, runs: Sequence[Interval], parts: tuple[Tensor, ...]) -> None:
        """Add results for `runs` of the owner's rows, which the parts hold one after another."""
        # This rank's own results cover all its rows from the start, since most works fill them.
        own = key.owner == self._rank
        rows = self._own_rows(key.kind) if own else Rows.of(runs)
        held = self._held.get(key)
        if held is None or not held.rows.covers(rows):
            held = self._grown(key, held, rows)
        held.add(runs, parts)

    def own(self, kind: Operand, num_groups: int, *, as_summed: bool = False) -> tuple[Tensor, ...]:
        """This rank's results, its groups of heads side by side; zeros where nothing was added.

        `as_summed`: keep the dtype of the sums where there are any, for a caller that adds more."""
        groups = []
        for index in range(num_groups):
            key = ResultKey(kind, self._rank, Share(index, num_groups))
            held = self._held.get(key) or self._make(key, self._own_rows(kind))
            groups.append(held.totals.total() if as_summed else held.totals.result())
        if num_groups == 1:
            return groups[0]
        return tuple(torch.cat(parts, 2) for parts in zip(*groups, strict=True))

    def outgoing(self, transfer: Transfer) -> Tensor:
        """Give up the partial result and return its bytes."""
        key, rows = _key(transfer.block), transfer.block.rows
        held = self._held[key]
        if held.rows != rows:
            held = self._grown(key, held, rows)
        del self._held[key]
        return held.packet(transfer.block.operand).buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        operand, _, rows, heads = transfer.block
        specs, device = self._specs(operand.partial, heads, rows)
        packet = Packet.empty([_wire_spec(spec, operand) for spec in specs], device)
        self._arriving.append((transfer, packet))
        return packet.buffer

    def land(self) -> None:
        """Add what has arrived."""
        for transfer, packet in self._arriving:
            block, key = transfer.block, _key(transfer.block)
            if block.owner == self._rank:
                self.add(key, block.rows.runs, packet.tensors)
                continue
            # The packet is the larger part: what is held is added to it.
            held = self._held.pop(key, None)
            self._held[key] = self._make(key, block.rows)
            self._held[key].adopt(packet)
            if held is not None:
                self.add(key, held.rows.runs, held.totals.total())
        self._arriving.clear()

    def _grown(self, key: ResultKey, held: Partial | None, rows: Rows) -> Partial:
        """Replace what was held by a partial result that covers `rows` too."""
        larger = self._make(key, rows if held is None else rows | held.rows)
        if held is not None:
            larger.add(held.rows.runs, held.totals.total())
        self._held[key] = larger
        return larger

    def _own_rows(self, kind: Operand) -> Rows:
        return Rows.first(self._like[kind][0].shape[1])

    def _make(self, key: ResultKey, rows: Rows) -> Partial:
        make = SoftmaxMerge if key.kind is Operand.OUT else RowSum
        return Partial(rows, make(*self._specs(key.kind, key.heads, rows)))

    def _specs(
        self, kind: Operand, heads: Share, rows: Rows
    ) -> tuple[list[TensorSpec], torch.device]:
        """The specs of a result's tensors, and their device."""
        like = [heads.cut(tensor, self._num_kv_heads) for tensor in self._like[kind]]
        specs = [TensorSpec((len(t), rows.size, *t.shape[2:]), t.dtype) for t in like]
        return out_specs(*specs) if kind is Operand.OUT else specs, like[0].device


def _key(block: Block) -> ResultKey:
    return ResultKey(block.operand.partial, block.owner, block.heads)


def _placed(
    rows: Rows, runs: Sequence[Interval], parts: tuple[Tensor, ...]
) -> Iterator[tuple[Interval, tuple[Tensor, ...]]]:
    """(place among the held `rows`, part of the tensors) of each run. Runs that are
    adjacent there are joined."""
    places = [rows.place(run) for run in runs]
    assert None not in places, f"rows {runs} of {rows}"
    joined = adjoined(place for place in places if place is not None)
    before = 0
    for place in joined:
        whole = len(joined) == 1
        yield place, parts if whole else tuple(p[:, before : before + place.size] for p in parts)
        before += place.size


def _wire_spec(spec: TensorSpec, operand: Operand) -> TensorSpec:
    return spec._replace(dtype=sum_dtype(spec.dtype)) if operand.is_sum else spec
