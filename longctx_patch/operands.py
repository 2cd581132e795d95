"""The inputs that one rank holds: its own tensors, and blocks of others in the plan's buffers."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from longctx_patch.layout import Interval
from longctx_patch.plans import Block, Operand, Transfer
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
    """Own and received inputs of one rank."""

    def __init__(self, rank: int, own: Mapping[Operand, tuple[Tensor, ...]]) -> None:
        self._rank = rank
        self._own = own
        self._packed: dict[Block, Packet] = {}
        self._buffers: dict[int, tuple[Block, Packet]] = {}
        self._arriving: dict[int, tuple[Block, Packet]] = {}

    def find(self, operand: Operand, owner: int, rows: Interval) -> Held:
        """Where these rows are; the plan has been checked to have brought them."""
        if owner == self._rank:
            return Held(self._own[operand], 0)
        for block, packet in self._buffers.values():
            if (block.operand, block.owner) == (operand, owner) and (
                block.rows.start <= rows.start and rows.stop <= block.rows.stop
            ):
                return Held(packet.tensors, block.rows.start)
        raise AssertionError(f"rank {self._rank} does not hold {operand}, {owner}, {rows}")

    def outgoing(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a whole block that came from elsewhere is passed on uncopied."""
        for block, packet in self._buffers.values():
            if block == transfer.block:
                return packet.buffer
        if transfer.block not in self._packed:
            held = self.find(*transfer.block)
            self._packed[transfer.block] = Packet.pack(held.rows(transfer.block.rows))
        return self._packed[transfer.block].buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        """Fresh memory for the block; what the buffer held goes back to the allocator."""
        assert transfer.buffer is not None
        like = self._own[transfer.block.operand]
        rows = transfer.block.rows.size
        specs = [TensorSpec((t.shape[0], rows, *t.shape[2:]), t.dtype) for t in like]
        packet = Packet.empty(specs, like[0].device)
        self._arriving[transfer.buffer] = (transfer.block, packet)
        return packet.buffer

    def land(self) -> None:
        """What has arrived can be found from now on."""
        self._buffers |= self._arriving
        self._arriving.clear()
