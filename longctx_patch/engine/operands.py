"""The inputs that one rank holds: its own tensors, and blocks of others in the plan's buffers."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.plans import EVERYONE, Block, Operand, Share, Transfer
from longctx_patch.sequence.layout import Interval, Layout, Rows
from longctx_patch.transport import Packet, TensorSpec


class Held(NamedTuple):
    """Tensors with rows of one owner along dim 1."""

    tensors: tuple[Tensor, ...]
    rows: Rows

    def pick(self, intervals: Iterable[Interval]) -> list[Tensor]:
        """The owner's rows in these intervals, one after another; views where they are adjacent."""
        return pick_rows(self.tensors, self.rows, intervals)


def pick_rows(tensors: Iterable[Tensor], held: Rows, intervals: Iterable[Interval]) -> list[Tensor]:
    """The rows in `intervals`, from tensors that hold the rows `held` along dim 1."""
    places = [held.place(run) for run in adjoined(intervals)]
    assert None not in places, f"rows {intervals} of {held}"
    if len(places) == 1 and (place := places[0]) is not None:
        return [tensor[:, place.start : place.stop] for tensor in tensors]
    slices = [slice(place.start, place.stop) for place in places if place is not None]
    return [torch.cat([tensor[:, rows] for rows in slices], 1) for tensor in tensors]


def adjoined(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in the order given; those that follow each other without a gap are joined."""
    runs: list[Interval] = []
    for interval in intervals:
        if runs and runs[-1].stop == interval.start:
            runs[-1] = Interval(runs[-1].start, interval.stop)
        else:
            runs.append(interval)
    return runs


class Inputs:
    """Own and received inputs of one rank; heads are along dim 2 of every tensor."""

    def __init__(
        self, rank: int, layout: Layout, own: Mapping[Operand, tuple[Tensor, ...]]
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._own = own
        self._num_kv_heads = own[Operand.KV][0].shape[2]
        self._packed: dict[Block, Packet] = {}
        self._buffers: dict[int, tuple[Block, Packet]] = {}
        self._arriving: dict[int, tuple[Block, Packet]] = {}
        self._gathered: tuple[Share, Held] | None = None

    def find(self, block: Block) -> Held:
        """The tensors that hold a block's rows; the plan was checked to have brought them here."""
        if block.owner == self._rank:
            tensors = self._own_heads(block.operand, block.heads)
            return Held(tensors, Rows.first(tensors[0].shape[1]))
        if block.owner == EVERYONE:
            return self._gather(block.heads)
        for held, packet in self._buffers.values():
            if block == held._replace(rows=block.rows) and held.rows.covers(block.rows):
                return Held(packet.tensors, held.rows)
        raise AssertionError(f"rank {self._rank} does not hold {block}")

    def outgoing(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a whole block that came from elsewhere is passed on uncopied."""
        for block, packet in self._buffers.values():
            if block == transfer.block:
                return packet.buffer
        if transfer.block not in self._packed:
            held = self.find(transfer.block)
            self._packed[transfer.block] = Packet.pack(held.pick(transfer.block.rows.runs))
        return self._packed[transfer.block].buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        """Fresh memory for the block; what the buffer held goes back to the allocator first."""
        assert transfer.buffer is not None
        self._buffers.pop(transfer.buffer, None)
        operand, _, rows, heads = transfer.block
        like = self._own_heads(operand, heads)
        specs = [TensorSpec((t.shape[0], rows.size, *t.shape[2:]), t.dtype) for t in like]
        packet = Packet.empty(specs, like[0].device)
        self._arriving[transfer.buffer] = (transfer.block, packet)
        return packet.buffer

    def land(self) -> None:
        """Let `find` see what has arrived."""
        self._buffers |= self._arriving
        self._arriving.clear()

    def _own_heads(self, operand: Operand, heads: Share) -> tuple[Tensor, ...]:
        return tuple(heads.cut(tensor, self._num_kv_heads) for tensor in self._own[operand])

    def _gather(self, heads: Share) -> Held:
        """The keys and values of all ranks in the order of the tokens, put together once."""
        if self._gathered is None or self._gathered[0] != heads:
            self._gathered = None  # give its memory back first
            places = self._layout.places(Interval(0, self._layout.num_tokens))
            runs = [
                self.find(Block(Operand.KV, owner, Rows((slots,)), heads)).pick([slots])
                for owner, slots, _ in places
            ]
            tensors = tuple(torch.cat(parts, 1) for parts in zip(*runs, strict=True))
            self._gathered = heads, Held(tensors, Rows.first(self._layout.num_tokens))
        return self._gathered[1]
