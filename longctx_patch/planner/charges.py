"""Bytes and seconds of single works and messages on a machine; arrays have an entry for each."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longctx_patch.planner.machines import Hardware
from longctx_patch.plans.pieces import PieceTable
from longctx_patch.plans.schedule import Moves, Works
from longctx_patch.plans.traffic import AttentionShape
from longctx_patch.plans.types import EVERYONE, Block, Direction, Share
from longctx_patch.sequence.layout import Interval, Rows
from longctx_patch.sequence.regions import Piece, Rule

Floats = NDArray[np.floating]

# Bytes per element of q that sequences of element-wise operations in float32 read and write.
_ROW_DOTS_BYTES = 28.0  # delta = rowsum(dout * out), where queries travel in backward
_SURROGATE_BYTES = 32.0  # an out with that delta, for kernels that don't take delta


@dataclass(frozen=True)
class Charges:
    """Says what work and messages of one direction cost."""

    pieces: PieceTable
    direction: Direction
    shape: AttentionShape
    hardware: Hardware

    def sizes(self, moves: Moves) -> Floats:
        """The bytes of each message."""
        row = Block(moves.operand, 0, Rows.first(1), moves.heads)
        return self.pieces.num_rows(moves.rows) * float(self.shape.block_bytes(row))

    def kernel_seconds(self, works: Works) -> Floats:
        """Seconds of attention's kernels for all pieces of each work."""
        num_heads = self._num_heads(works.heads)

        def of(pieces: tuple[Piece, ...]) -> float:
            return sum(
                self.hardware.kernel_seconds(
                    self.direction,
                    call,
                    batch=self.shape.batch,
                    num_heads=num_heads,
                    head_dim=self.shape.head_dim,
                )
                for call in _calls(pieces)
            )

        return self.pieces.measure(works.kind, of)

    def expanding_seconds(self, works: Works) -> Floats:
        """Seconds to expand the latents of each call's keys: one product; in backward once more,
        beside the products of two gradients."""
        products = 1 if self.direction is Direction.FORWARD else 3
        flops = 2.0 * products * self.shape.batch * self.shape.expansion

        def rows(pieces: tuple[Piece, ...]) -> int:
            return sum(Rows.of(piece.kv for piece in call).size for call in _calls(pieces))

        if not flops:
            return np.zeros(len(works.rank))
        return self.pieces.measure(works.kind, rows) * (flops / self.hardware.matmul_flops)

    def adding_seconds(self, works: Works, is_first: NDArray[np.bool_]) -> Floats:
        """Seconds to add each work's results to totals: read the result, read and write the total.

        The first result of a row becomes the total as it is and costs nothing. A rank's own rows
        have their first result where the work `is_first`. Rows of others always count as first,
        because their results are added where they land.
        """
        per_q, per_kv = self._elements(works.heads)
        elements = per_q * self.query_rows_added(works, is_first)
        if self.direction is Direction.BACKWARD:
            gathered = works.kv_owner == EVERYONE
            columns = self._rows_added(
                works, (works.kv_owner != works.rank) | is_first, lambda piece: piece.kv
            )
            # Of gathered keys only the rank's own are added to by several pieces.
            own = self.pieces.sizes[works.rank]
            elements = elements + per_kv * np.where(gathered, np.minimum(own, columns), columns)
        moved = self.shape.itemsize_bytes + 2 * self.shape.sum_itemsize_bytes
        return moved * elements / self._adding_bandwidth

    def query_rows_added(self, works: Works, is_first: NDArray[np.bool_]) -> Floats:
        """The number of rows of each work that are added to a total."""
        return self._rows_added(
            works, (works.q_owner != works.rank) | is_first, lambda piece: piece.q
        )

    def _rows_added(
        self, works: Works, first_is_free: NDArray[np.bool_], side: Callable[[Piece], Interval]
    ) -> Floats:
        """The number of rows of each work's pieces; a row's first piece may be free."""

        def later(pieces: tuple[Piece, ...]) -> int:
            return sum(side(piece).size for piece in pieces) - Rows.of(map(side, pieces)).size

        every = self.pieces.measure(works.kind, lambda p: sum(side(piece).size for piece in p))
        return np.where(first_is_free, self.pieces.measure(works.kind, later), every)

    def preparing_seconds(self, works: Works) -> Floats:
        """Seconds to make an `out` for queries that came and to gather keys, before the kernels."""
        per_q, _ = self._elements(works.heads)
        moved = np.zeros(len(works.rank))
        if self.direction is Direction.BACKWARD:
            rows = self.pieces.num_rows(self.pieces.q_rows(works.kind))
            came = works.rank != works.q_owner
            moved += np.where(came, _SURROGATE_BYTES * per_q * rows, 0.0)
        return moved / self.hardware.copy_bandwidth + self.copy_seconds(self.gathered_bytes(works))

    def copy_seconds(self, num_bytes: Floats) -> Floats:
        """Seconds to copy bytes, which are read and written."""
        return 2 * num_bytes / self.hardware.copy_bandwidth

    def gathered_bytes(self, works: Works) -> Floats:
        """Bytes of all ranks' keys and values, put side by side for each work that reads them."""
        _, per_kv = self._elements(works.heads)
        everything = self.shape.itemsize_bytes * self.pieces.layout.num_tokens * per_kv
        return np.where(works.kv_owner == EVERYONE, everything, 0.0)

    def landing_seconds(self, moves: Moves, sizes: Floats) -> Floats:
        """Seconds to add results that have arrived to a total."""
        if moves.operand.is_input:
            return np.zeros_like(sizes)
        wide = moves.operand.is_sum
        ratio = 1.0 if wide else self.shape.sum_itemsize_bytes / self.shape.itemsize_bytes
        return sizes * (1 + 2 * ratio) / self._adding_bandwidth

    def delta_seconds(self) -> Floats:
        """Seconds for each rank to compute delta of its own rows, which travels with queries."""
        per_row = self.shape.batch * self.shape.num_heads * self.shape.head_dim
        return self.pieces.sizes * (_ROW_DOTS_BYTES * per_row / self.hardware.copy_bandwidth)

    def closing_seconds(self, rows: Floats) -> Floats:
        """Seconds for each rank to cast `rows` of queries' totals to the dtype of the model."""
        shape = self.shape
        per_row = shape.batch * shape.num_heads * shape.head_dim
        moved = per_row * (shape.sum_itemsize_bytes + shape.itemsize_bytes)
        return rows * (moved / self.hardware.copy_bandwidth)

    def areas(self, works: Works) -> Floats:
        """The number of (query, key) pairs of each work, times its share of the heads."""
        area = self.pieces.measure(works.kind, lambda pieces: sum(p.area for p in pieces))
        return area * (self._num_heads(works.heads) / self.shape.num_heads)

    def host_seconds(self, works: Works) -> Floats:
        """Seconds of the CPU to issue each work's kernels and what adds their results."""
        forward = self.direction is Direction.FORWARD
        call = self.hardware.host_forward_s if forward else self.hardware.host_backward_s
        return call * self.pieces.measure(works.kind, lambda pieces: len(_calls(pieces)))

    @property
    def _adding_bandwidth(self) -> float:
        forward = self.direction is Direction.FORWARD
        return self.hardware.merge_bandwidth if forward else self.hardware.add_bandwidth

    def _elements(self, heads: Share) -> tuple[float, float]:
        """The number of elements of a token's query, and of its key and value."""
        query, kv = self.shape.head_dim, self.shape.kv_dim
        batch = float(self.shape.batch)
        return batch * self._num_heads(heads) * query, batch * self._num_kv_heads(heads) * kv

    def _num_heads(self, heads: Share) -> int:
        return heads.range(self.shape.num_heads, self.shape.num_kv_heads).size

    def _num_kv_heads(self, heads: Share) -> int:
        return heads.range(self.shape.num_kv_heads, self.shape.num_kv_heads).size


def _calls(pieces: tuple[Piece, ...]) -> list[list[Piece]]:
    """The kernel calls for some pieces: pieces of one rule with disjoint rows share a call."""
    of_rules: dict[Rule, list[list[Piece]]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.q):
        calls = of_rules.setdefault(piece.rule, [])
        free = next((call for call in calls if call[-1].q.stop <= piece.q.start), None)
        if free is None:
            calls.append([piece])
        else:
            free.append(piece)
    return [call for calls in of_rules.values() for call in calls]
