"""The inputs that one rank holds: its own tensors, and blocks of others in the plan's buffers."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from longctx_patch.layout import Interval, Layout
from longctx_patch.plans import EVERYONE, Block, Operand, Share, Transfer
from longctx_patch.transport import Packet, TensorSpec


class Held(NamedTuple):
    """Tensors of one owner, rows along dim 1, and the owner's row that their first row is."""

    tensors: tuple[Tensor, ...]
    first_row: int

    def rows(self, rows: Interval) -> list[Tensor]:
        """Views of some of the owner's rows."""
        start = rows.start - self.first_row
        return [tensor[:, start : start + rows.size] for tensor in self.tensors]


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
        """Where these rows are; the plan has been checked to have brought them."""
        if block.owner == self._rank:
            return Held(self._own_heads(block.operand, block.heads), 0)
        if block.owner == EVERYONE:
            return self._gather(block.heads)
        for held, packet in self._buffers.values():
            if block == held._replace(rows=block.rows) and (
                held.rows.start <= block.rows.start and block.rows.stop <= held.rows.stop
            ):
                return Held(packet.tensors, held.rows.start)
        raise AssertionError(f"rank {self._rank} does not hold {block}")

    def outgoing(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a whole block that came from elsewhere is passed on uncopied."""
        for block, packet in self._buffers.values():
            if block == transfer.block:
                return packet.buffer
        if transfer.block not in self._packed:
            held = self.find(transfer.block)
            self._packed[transfer.block] = Packet.pack(held.rows(transfer.block.rows))
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
        """What has arrived can be found from now on."""
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
                self.find(Block(Operand.KV, owner, slots, heads)).rows(slots)
                for owner, slots, _ in places
            ]
            tensors = tuple(torch.cat(parts, 1) for parts in zip(*runs, strict=True))
            self._gathered = heads, Held(tensors, 0)
        return self._gathered[1]
