"""Bytes and seconds of single works and messages on a machine; arrays have an entry for each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longctx_patch.layout import Interval
from longctx_patch.masks import Piece
from longctx_patch.plans.hardware import Hardware
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Moves, Works
from longctx_patch.plans.traffic import AttentionShape
from longctx_patch.plans.types import EVERYONE, Block, Direction, Share

Floats = NDArray[np.floating]

# Bytes per element of q that element-wise operations one after another read and write in float32.
_ROW_DOTS_BYTES = 28.0  # delta = rowsum(dout * out), where queries travel in backward
_SURROGATE_BYTES = 32.0  # an out with that delta, for kernels that don't take delta


@dataclass(frozen=True)
class Charges:
    """What things cost in one direction."""

    pieces: PieceTable
    direction: Direction
    shape: AttentionShape
    hardware: Hardware

    def sizes(self, moves: Moves) -> Floats:
        """Bytes of each message."""
        row = Block(moves.operand, 0, Interval(0, 1), moves.heads)
        return (moves.stop - moves.start) * float(self.shape.block_bytes(row))

    def kernel_seconds(self, works: Works) -> Floats:
        """Attention's kernels, all pieces of each work."""
        num_heads = self._num_heads(works.heads)

        def of(pieces: tuple[Piece, ...]) -> float:
            return sum(
                self.hardware.kernel_seconds(
                    self.direction,
                    piece,
                    batch=self.shape.batch,
                    num_heads=num_heads,
                    head_dim=self.shape.head_dim,
                )
                for piece in pieces
            )

        return self.pieces.measure(works.kind, of)

    def adding_seconds(self, works: Works) -> Floats:
        """Adding the results of each work to totals: read the result, read and write the total."""
        per_q, per_kv = self._elements(works.heads)
        forward = self.direction is Direction.FORWARD

        def elements(pieces: tuple[Piece, ...]) -> float:
            rows = sum(piece.q.size for piece in pieces)
            columns = 0 if forward else sum(piece.kv.size for piece in pieces)
            return rows * per_q + columns * per_kv

        moved = self.shape.itemsize_bytes + 2 * self.shape.sum_itemsize_bytes
        return moved * self.pieces.measure(works.kind, elements) / self._adding_bandwidth

    def preparing_seconds(self, works: Works) -> Floats:
        """What precedes the kernels: an `out` for queries that came, all keys side by side."""
        per_q, per_kv = self._elements(works.heads)
        moved = np.zeros(len(works.rank))
        if self.direction is Direction.BACKWARD:
            start, stop = self.pieces.q_rows(works.kind)
            came = works.rank != works.q_owner
            moved += np.where(came, _SURROGATE_BYTES * per_q * (stop - start), 0.0)
        everything = 2 * self.shape.itemsize_bytes * self.pieces.layout.num_tokens * per_kv
        moved += np.where(works.kv_owner == EVERYONE, everything, 0.0)
        return moved / self.hardware.copy_bandwidth

    def pack_seconds(self, moves: Moves, sizes: Floats) -> Floats:
        """Copying into the message: what a rank owns or has computed; the rest is passed on."""
        copied = moves.source == moves.owner if moves.operand.is_input else True
        return np.where(copied, 2 * sizes / self.hardware.copy_bandwidth, 0.0)

    def landing_seconds(self, moves: Moves, sizes: Floats) -> Floats:
        """Adding results that have arrived to a total."""
        if moves.operand.is_input:
            return np.zeros_like(sizes)
        wide = moves.operand.is_sum
        ratio = 1.0 if wide else self.shape.sum_itemsize_bytes / self.shape.itemsize_bytes
        return sizes * (1 + 2 * ratio) / self._adding_bandwidth

    def delta_seconds(self) -> Floats:
        """By rank: delta of its own rows, for a schedule that sends queries in backward."""
        per_row = self.shape.batch * self.shape.num_heads * self.shape.head_dim
        return self.pieces.sizes * (_ROW_DOTS_BYTES * per_row / self.hardware.copy_bandwidth)

    def closing_seconds(self) -> Floats:
        """By rank: the totals of its queries, from the dtype of sums to that of the model."""
        shape = self.shape
        per_row = shape.batch * shape.num_heads * shape.head_dim
        moved = per_row * (shape.sum_itemsize_bytes + shape.itemsize_bytes)
        return self.pieces.sizes * (moved / self.hardware.copy_bandwidth)

    def areas(self, works: Works) -> Floats:
        """Pairs of each work, times its share of the heads."""
        area = self.pieces.measure(works.kind, lambda pieces: sum(p.area for p in pieces))
        return area * (self._num_heads(works.heads) / self.shape.num_heads)

    def host_seconds(self, works: Works) -> Floats:
        """Of the CPU: issuing each work's kernels and what adds their results."""
        forward = self.direction is Direction.FORWARD
        call = self.hardware.host_forward_s if forward else self.hardware.host_backward_s
        return call * self.pieces.measure(works.kind, len)

    @property
    def _adding_bandwidth(self) -> float:
        forward = self.direction is Direction.FORWARD
        return self.hardware.merge_bandwidth if forward else self.hardware.add_bandwidth

    def _elements(self, heads: Share) -> tuple[float, float]:
        """Elements of a token's query and of its key and value."""
        per_head = float(self.shape.batch * self.shape.head_dim)
        return self._num_heads(heads) * per_head, 2 * self._num_kv_heads(heads) * per_head

    def _num_heads(self, heads: Share) -> int:
        return heads.range(self.shape.num_heads, self.shape.num_kv_heads).size

    def _num_kv_heads(self, heads: Share) -> int:
        return heads.range(self.shape.num_kv_heads, self.shape.num_kv_heads).size


def own_inputs_packed_once(moves: Moves, seconds: Floats, num_ranks: int) -> Floats:
    """By rank: seconds of packing; one block that goes to several ranks is packed once."""
    by_rank = np.zeros(num_ranks)
    if moves.operand.is_input:
        np.maximum.at(by_rank, moves.source, seconds)
    else:
        by_rank += np.bincount(moves.source, seconds, num_ranks)
    return by_rank
