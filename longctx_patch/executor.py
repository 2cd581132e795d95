"""Walk one rank through a verified plan.

Shapes: B batch, L this rank's query tokens, M key tokens of a block, H query heads, G key-value
heads, D head dim. Every rank of the ring calls the same function with its own shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longctx_patch.accumulate import RowSum, SoftmaxMerge, sum_dtype
from longctx_patch.kernels import Kernel
from longctx_patch.layout import Interval
from longctx_patch.masks import Piece
from longctx_patch.plans import Block, Operand, Plan, RankStep, Transfer
from longctx_patch.transport import Message, Packet, Pending, TensorSpec, Transport


@dataclass(frozen=True)
class Executor:
    """What stays the same over the steps of forward and backward."""

    transport: Transport
    kernel: Kernel
    scale: float

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLHD in q's dtype, lse_BHL) of q_BLHD over the keys of all ranks."""
        merge = SoftmaxMerge(q)
        blocks = _KeyValueBlocks(self.transport, plan, k, v)
        for step in plan.rank_steps[self.transport.group_rank]:
            pending = self._post(blocks, None, step)
            for work in step.works:
                keys, values = blocks.tensors(work.kv_owner)
                for piece in work.pieces:
                    q_rows, k_rows, v_rows = _rows(piece, q, keys, values)
                    out, lse = self.kernel.forward(
                        q_rows, k_rows, v_rows, causal=piece.causal, scale=self.scale
                    )
                    self.transport.counters.kernel_calls += 1
                    merge.add(piece.q, out, lse)
            pending.wait()
        return merge.result()

    def backward(
        self, plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLHD, dk_BLGD, dv_BLGD) of this rank's shard; `out` and `lse` are forward's."""
        blocks = _KeyValueBlocks(self.transport, plan, k, v)
        sums = _GradientSums(self.transport.group_rank, plan, q, k, v)
        for step in plan.rank_steps[self.transport.group_rank]:
            pending = self._post(blocks, sums, step)
            for work in step.works:
                keys, values = blocks.tensors(work.kv_owner)
                for piece in work.pieces:
                    rows = slice(*piece.q)
                    q_rows, k_rows, v_rows = _rows(piece, q, keys, values)
                    grads = self.kernel.backward(
                        dout[:, rows],
                        q_rows,
                        k_rows,
                        v_rows,
                        out[:, rows],
                        lse[:, :, rows],
                        causal=piece.causal,
                        scale=self.scale,
                    )
                    self.transport.counters.kernel_calls += 1
                    sums.add(work.kv_owner, piece, *grads)
            pending.wait()
            sums.land()
        return sums.result()

    def _post(
        self, blocks: "_KeyValueBlocks", sums: "_GradientSums | None", step: RankStep
    ) -> Pending:
        """Post the step's messages, in the order of the plan on both sides."""

        def buffer(transfer: Transfer, *, sending: bool) -> Tensor:
            if transfer.block.operand is Operand.KV:
                return blocks.outgoing(transfer) if sending else blocks.incoming(transfer)
            assert sums is not None, "gradients travel in backward only"
            return sums.outgoing(transfer) if sending else sums.incoming(transfer)

        sends = [Message(t.destination, buffer(t, sending=True)) for t in step.sends]
        receives = [Message(t.source, buffer(t, sending=False)) for t in step.receives]
        return self.transport.exchange(sends, receives)


class _KeyValueBlocks:
    """This rank's keys and values and the blocks of others, in the plan's buffers."""

    def __init__(self, transport: Transport, plan: Plan, k: Tensor, v: Tensor) -> None:
        self._rank = transport.group_rank
        self._plan = plan
        self._own = (k, v)
        self._own_packet: Packet | None = None
        self._buffers: dict[int, tuple[Block, Packet]] = {}

    def tensors(self, owner: int) -> Sequence[Tensor]:
        """Keys and values of one owner."""
        return self._own if owner == self._rank else self._held(owner).tensors

    def outgoing(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a block that came from elsewhere is passed on without a copy."""
        if transfer.block.owner != self._rank:
            return self._held(transfer.block.owner).buffer
        if self._own_packet is None:
            self._own_packet = Packet.pack(self._own)
        return self._own_packet.buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        """Fresh memory for the block; what the buffer held goes back to the allocator."""
        k, v = self._own
        rows = transfer.block.rows.size
        specs = [TensorSpec((t.shape[0], rows, *t.shape[2:]), t.dtype) for t in (k, v)]
        packet = Packet.empty(specs, k.device)
        assert transfer.buffer is not None
        self._buffers[transfer.buffer] = (transfer.block, packet)
        return packet.buffer

    def _held(self, owner: int) -> Packet:
        return next(packet for block, packet in self._buffers.values() if block.owner == owner)


class _GradientSums:
    """dq and dk, dv of this rank, and the partial dk, dv it holds for others."""

    def __init__(self, rank: int, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._rank = rank
        self._sizes = plan.layout.sizes
        self._like = (k, v)
        self._dq, self._dk, self._dv = RowSum(q), RowSum(k), RowSum(v)
        self._travelling: dict[int, Packet] = {}
        self._landing: list[tuple[int, Packet]] = []

    def add(self, kv_owner: int, piece: Piece, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self._dq.add(piece.q, dq)
        if kv_owner == self._rank:
            self._dk.add(piece.kv, dk)
            self._dv.add(piece.kv, dv)
            return
        if kv_owner not in self._travelling:
            self._travelling[kv_owner] = self._packet(self._sizes[kv_owner])
            self._travelling[kv_owner].buffer.zero_()
        for total, part in zip(self._travelling[kv_owner].tensors, (dk, dv), strict=True):
            total[:, slice(*piece.kv)] += part

    def outgoing(self, transfer: Transfer) -> Tensor:
        """Give up the partial sum."""
        return self._travelling.pop(transfer.block.owner).buffer

    def incoming(self, transfer: Transfer) -> Tensor:
        packet = self._packet(transfer.block.rows.size)
        self._landing.append((transfer.block.owner, packet))
        return packet.buffer

    def land(self) -> None:
        """Add what has arrived."""
        for owner, packet in self._landing:
            if owner == self._rank:
                everything = Interval(0, self._sizes[owner])
                for total, part in zip((self._dk, self._dv), packet.tensors, strict=True):
                    total.add(everything, part)
            elif owner in self._travelling:
                self._travelling[owner].buffer.view(packet.tensors[0].dtype).add_(
                    packet.buffer.view(packet.tensors[0].dtype)
                )
            else:
                self._travelling[owner] = packet
        self._landing.clear()

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._dq.result(), self._dk.result(), self._dv.result()

    def _packet(self, rows: int) -> Packet:
        specs = [
            TensorSpec((t.shape[0], rows, *t.shape[2:]), sum_dtype(t.dtype)) for t in self._like
        ]
        return Packet.empty(specs, self._like[0].device)


def _rows(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    columns = slice(*piece.kv)
    return q[:, slice(*piece.q)], k[:, columns], v[:, columns]
