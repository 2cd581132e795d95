"""Which messages a rank must copy into a buffer before it sends them, stage by stage.

A rank copies a block of its own once, however often it sends the block, and passes blocks of others
on uncopied. A single contribution is copied; a sum that arrived goes on in the packet it came in.
"""

import numpy as np

from longctx_patch.plans.pieces import Ints
from longctx_patch.plans.schedule import Moves
from longctx_patch.plans.types import Operand, Share
from longctx_patch.predict.attention.charges import Floats


class Packing:
    """Keeps what each rank has copied and received so far."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.kept_bytes: Floats = np.zeros(num_ranks)
        """Bytes of each rank's packed inputs, which stay until the call ends."""
        self._packed: dict[tuple[Operand, Share, int], np.ndarray] = {}
        self._sum_at: Ints = np.full(num_ranks, -1)  # by rank: whose sum arrived last

    def copied_bytes(self, moves: Moves, sizes: Floats) -> Floats:
        """The bytes that each rank must copy to send these messages."""
        if moves.operand.is_input:
            return self._own_blocks(moves, sizes)
        copied = np.ones(len(sizes), dtype=bool)
        if moves.operand.is_sum:
            copied = self._sum_at[moves.source] != moves.owner
        copied_sizes = np.where(copied, sizes, 0.0)
        return np.bincount(moves.source, copied_sizes, self.num_ranks).astype(np.float64)

    def land(self, moves: Moves) -> None:
        """Note the sums that arrive."""
        if moves.operand.is_sum:
            self._sum_at[moves.destination] = moves.owner

    def _own_blocks(self, moves: Moves, sizes: Floats) -> Floats:
        copied = np.zeros(self.num_ranks)
        own = moves.source == moves.owner
        for rows in np.unique(moves.rows[own]).tolist():
            chosen = own & (moves.rows == rows)
            block = np.zeros(self.num_ranks)
            block[moves.source[chosen]] = sizes[chosen]
            key = (moves.operand, moves.heads, rows)
            done = self._packed.setdefault(key, np.zeros(self.num_ranks, dtype=bool))
            copied += np.where(done, 0.0, block)
            done |= block > 0
        self.kept_bytes += copied
        return copied
